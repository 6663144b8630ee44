# The whole system in an image, from the project's locks: docs/quickstart.md.
#
#   docker build -t asyncrl .                                 # stock SGLang and TransformerEngine on CUDA
#   docker build -t asyncrl:cpu --build-arg VARIANT=cpu --build-arg PIP_EXTRA_INDEX_URL=<PyTorch's CPU index> .
#
# VARIANT picks the base and the lock, requirements/VARIANT.txt; every other step is shared. `make container` runs those of
# the CPU variant in a clean root. The GPU variant has been linted and its lock resolved; it has never been built.
ARG VARIANT=gpu
ARG GPU_BASE=nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
ARG CPU_BASE=python:3.11.14-slim-bookworm

# CUDA 13.0 is what torch 2.13.0 is built for. The compilers (nvcc, g++) and Python.h stay in the image: SGLang, triton and
# flashinfer compile kernels when they first need them. sglang-kernel links libnuma; InfiniBand is the next three; sandboxes
# are made by bubblewrap, their system-call filter by libseccomp. Ubuntu's own user goes, whose uid is to be ours.
FROM ${GPU_BASE} AS base-gpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        g++ python3-dev python3-venv libnuma1 libibverbs1 ibverbs-providers librdmacm1 \
        bubblewrap libseccomp2 \
    && apt-get clean && rm -rf /var/lib/apt/lists/* \
    && userdel --remove ubuntu
ENV CUDA_HOME=/usr/local/cuda

FROM ${CPU_BASE} AS base-cpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap libseccomp2 \
    && apt-get clean && rm -rf /var/lib/apt/lists/*

# The project's wheel, by build tools out of the lock, which stay here.
FROM base-${VARIANT} AS wheel
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY requirements/ requirements/
RUN python3 -m venv /opt/build \
    && grep -hE '^(hatchling|packaging|pathspec|pluggy|trove-classifiers)==' requirements/cpu.txt requirements/dev.txt \
        > /tmp/build.txt \
    && /opt/build/bin/pip install --no-deps -r /tmp/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY conf/ conf/
COPY recipes/ recipes/
COPY asyncrl/ asyncrl/
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /dist .

# The environment. Nothing is resolved here: --no-deps takes the lock as it is, and without build isolation what has no wheel
# is built by the lock's own setuptools (--use-pep517: whichever pip the base has). Index and proxy come as build arguments,
# and stay out of the last stage.
FROM base-${VARIANT} AS environment
ARG VARIANT
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update && apt-get install -y --no-install-recommends g++ && apt-get clean && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:${PATH}
COPY requirements/${VARIANT}.txt /tmp/lock.txt
RUN grep -E '^(setuptools|wheel)==' /tmp/lock.txt > /tmp/tools.txt \
    && pip install --no-deps -r /tmp/tools.txt
# TransformerEngine's extension compiles against the torch that is there, so it comes last; by itself it would first look for
# a binary on its release page.
RUN grep -v '^transformer-engine-torch==' /tmp/lock.txt > /tmp/first.txt \
    && pip install --no-deps --no-build-isolation --use-pep517 -r /tmp/first.txt \
    && NVTE_PYTORCH_FORCE_BUILD=TRUE pip install --no-deps --no-build-isolation --use-pep517 -r /tmp/lock.txt
COPY --from=wheel /dist/ /tmp/dist/
# A CUDA build of torch without its libraries (no PIP_EXTRA_INDEX_URL for the CPU variant) shows here, not in the first run.
RUN pip install --no-deps /tmp/dist/*.whl && python -c "import torch"

FROM base-${VARIANT} AS image
ARG VARIANT
LABEL org.opencontainers.image.title="asyncrl (${VARIANT})" \
      org.opencontainers.image.description="Asynchronous RL for LLMs with Megatron and SGLang" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 1000 --create-home --shell /bin/bash asyncrl \
    && install --directory --owner=asyncrl --group=asyncrl /workspace
COPY --from=environment /opt/venv/ /opt/venv/
# Two torch threads per process under contention are many times slower than one.
ENV PATH=/opt/venv/bin:${PATH} OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
# By number, so that a cluster can see that it is not root. Runs go to ./runs: mount a folder here to keep them.
USER 1000:1000
WORKDIR /workspace
ENTRYPOINT ["asyncrl-train"]
