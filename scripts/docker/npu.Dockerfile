# Not built or run on hardware. Atlas A2:
#   docker build -f scripts/docker/npu.Dockerfile -t rltrain:npu-a2 .
# Atlas A3 (the image has vllm-ascend built for it):
#   docker build -f scripts/docker/npu.Dockerfile --build-arg VARIANT=-a3 -t rltrain:npu-a3 .
# vllm-ascend's image has CANN, NNAL, torch, torch_npu, vllm and vllm-ascend in it, of one release.
ARG VARIANT=""
FROM quay.io/ascend/vllm-ascend:v0.23.0${VARIANT}
WORKDIR /rltrain
COPY . .
# What the image brings stays as it is: the constraints are its versions, and nothing of rltrain asks for others.
RUN pip install --no-cache-dir -c scripts/constraints-npu.txt -e .[lora,math]
RUN python -c 'from rltrain.common.versions import others; print(others("npu") or "the set for npu")'
# It stays root: the devices belong to a group of the host (HwHiAiUser) whose number the image cannot know. Where you know it:
#   docker run --user 10001 --group-add NUMBER …
