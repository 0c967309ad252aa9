# hfpatch on NVIDIA GPUs (about 6.3 GB): torch's wheels bring CUDA's libraries, the host has the driver and NVIDIA's container
# toolkit. In the root of a clone:
#   docker build --file docker/cuda.Dockerfile --tag hfpatch:cuda .
#   docker run --rm --gpus all --volume "$PWD/runs:/work/runs" hfpatch:cuda compare pythia-160m
FROM python:3.11-slim

ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 HF_HOME=/cache/huggingface HFPATCH_CACHE=/cache/hfpatch
# torch.compile builds its kernels with a C compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /src/
RUN pip install --constraint /src/constraints.txt torch
COPY pyproject.toml README.md LICENSE /src/
COPY hfpatch /src/hfpatch
COPY recipes /src/recipes
COPY eval /src/eval
RUN pip install --constraint /src/constraints.txt '/src[lab]' \
    && useradd --create-home --uid 1000 hfpatch \
    && install --directory --owner 1000 /cache /work
USER 1000
WORKDIR /work
ENTRYPOINT ["hfpatch"]
CMD ["--help"]
