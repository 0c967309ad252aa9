# hfpatch on CPUs, with torch's CPU build (about 2.3 GB). In the root of a clone:
#   docker build --file docker/cpu.Dockerfile --tag hfpatch:cpu .
#   docker run --rm --volume "$PWD/runs:/work/runs" hfpatch:cpu compare quickstart
FROM python:3.11-slim

ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 HF_HOME=/cache/huggingface HFPATCH_CACHE=/cache/hfpatch
COPY constraints.txt /src/
RUN pip install --constraint /src/constraints.txt --no-deps --index-url https://download.pytorch.org/whl/cpu torch
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
