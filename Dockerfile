# jax_bnar with the kernels for CPUs, or also with those for NVIDIA GPUs:
#
#     docker build --tag jax_bnar .
#     docker run --rm jax_bnar                      # does it work there? (the doctor)
#
#     docker build --target cuda13 --tag jax_bnar:cuda13 .
#     docker run --rm --gpus all jax_bnar:cuda13
#
# The compilers stay in the stages that build the wheels.

# An image with Python 3.11 or newer on Debian or Ubuntu.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
# A newer compiler of the same distribution does as well, so its version is not named.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

# CMake finds the CUDA compiler of these packages. CUDAARCHS=90-real compiles for one architecture
# (here Hopper), which takes a fourth of the time.
FROM build AS build-cuda13
ARG CUDAARCHS="80-real;90-real;100-real;120"
RUN python /source/.ci/requirements.py cuda-compiler > /cuda-compiler.txt \
    && pip install --no-cache-dir --requirement /cuda-compiler.txt \
    && CUDACXX="$(python -c 'import nvidia; print(nvidia.__path__[0])')/cu13/bin/nvcc" \
        CUDAARCHS="${CUDAARCHS}" \
        pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source/distributions/cuda13

FROM ${BASE} AS cuda13
RUN --mount=type=bind,from=build-cuda13,source=/wheels,target=/wheels \
    pip install --no-cache-dir --find-links /wheels "$(ls /wheels/jax_bnar-*.whl)[cuda13,flax]"
WORKDIR /work
CMD ["python", "-m", "jax_bnar.doctor"]

# The last stage is what is built unless --target names another.
FROM ${BASE} AS cpu
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(ls /wheels/jax_bnar-*.whl)[flax]"
WORKDIR /work
CMD ["python", "-m", "jax_bnar.doctor"]
