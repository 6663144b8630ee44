# GPU image: stock SGLang and TransformerEngine on a PyTorch/CUDA base.
#
#   docker build -t asyncrl . && docker run --gpus all --ipc=host asyncrl experiment=...
#
# Not built where it was written, a machine without a GPU and without an image registry; there the `gpu` extra was resolved
# (not installed) for Python 3.11 on x86_64, glibc 2.35. The base must have torch 2.13.0, CUDA 13 and glibc 2.34 or newer.
ARG BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel
FROM ${BASE}

ENV PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1 OMP_NUM_THREADS=1
WORKDIR /opt/asyncrl

# The build tools come from the lock: TransformerEngine's torch extension compiles against the torch that is already
# there, so it needs --no-build-isolation, and so do the others in the same call.
COPY requirements/ requirements/
RUN grep -hE '^(hatchling|editables|packaging|pathspec|pluggy|setuptools|tomlkit|trove-classifiers)==' requirements/*.txt > /tmp/build.txt \
    && pip install --no-deps -r /tmp/build.txt

COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY conf/ conf/
COPY asyncrl/ asyncrl/
RUN pip install --no-build-isolation ".[gpu]"

WORKDIR /workspace
ENTRYPOINT ["asyncrl-train"]
