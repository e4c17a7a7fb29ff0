# Not built on a machine with GPUs: docker build -f scripts/docker/cuda.Dockerfile -t rltrain:cuda .
# CUDA's libraries come with PyTorch's packages; the compiler is for kernels that vLLM and Triton make while they run.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends git python3-dev python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /rltrain
COPY . .
RUN pip install --no-cache-dir -c scripts/constraints-cuda.txt -e .[cuda,lora,images,math]
RUN useradd --create-home --uid 10001 rltrain && chown rltrain /rltrain
USER rltrain
