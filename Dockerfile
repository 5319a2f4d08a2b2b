# An image of alltoallv; the first line is for CPUs, the second for hosts with Ascend NPUs (docs/ascend-start.md):
#   docker build -t alltoallv .
#   docker build -t alltoallv-npu --build-arg BASE=quay.io/ascend/cann:8.5.1-910b-ubuntu22.04-py3.11 --build-arg EXTRA=npu .
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
# Both Debian 12 and Ubuntu 22.04 have this one.
RUN apt-get update && apt-get install -y --no-install-recommends g++-12
ENV CC=gcc-12 CXX=g++-12
COPY . /src
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM ${BASE}
# torch, npu, mindspore, paddle, jax or several of them, divided by commas
ARG EXTRA=torch
# PyPI's torch brings 5.5 GB for NVIDIA's GPUs, and torch_npu refuses it. A mirror of this index may be nearer.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN case ",${EXTRA}," in *,torch,*|*,npu,*) \
      python3 -m pip install --no-cache-dir "torch==2.13.*" --index-url "${TORCH_INDEX}";; esac
COPY --from=build /wheels /wheels
RUN python3 -m pip install --no-cache-dir "$(echo /wheels/*.whl)[${EXTRA}]"
CMD ["python3", "-m", "alltoallv", "doctor"]
