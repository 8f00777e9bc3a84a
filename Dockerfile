# One image for every process of a federation: vfl-server, vfl-party, vfl.
#
#   docker build -t vfl .
#   docker build -t vfl --build-arg TORCH=cuda .
#
# TORCH  auto (default): torch for CPUs where its index answers, else PyPI's, which is larger and brings CUDA's
#                        libraries; it computes on CPUs too
#        cpu:            from TORCH_CPU_INDEX, or the build fails
#        cuda:           PyPI's
# pip's own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_TRUSTED_HOST) are build arguments too.
#
# Versions and hashes of all libraries are in deploy/locks. Torch's builds for CPUs are fixed by version alone, because
# their hashes are on their own index.
#
# The base image has a tag here and no digest: no registry could be asked for one when this was written. Pin it where
# you build: --build-arg PYTHON=python:3.11-slim-bookworm@sha256:... (docker buildx imagetools inspect shows it).
#
# It builds with and without BuildKit. What changes rarely comes first: torch, the other libraries, this project.
ARG PYTHON=python:3.11-slim-bookworm

# -- the libraries -------------------------------------------------------------------------------------------------
FROM ${PYTHON} AS dependencies
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/vfl
ENV PATH=/opt/vfl/bin:$PATH
COPY deploy/install-torch deploy/locks/requirements-cuda.txt /install/
ARG PIP_INDEX_URL=https://pypi.org/simple
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
ARG TORCH=auto
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
RUN /install/install-torch /install/requirements-cuda.txt
COPY deploy/locks/requirements-cpu.txt /install/
RUN pip install --no-deps --require-hashes -r /install/requirements-cpu.txt && \
    python -c 'import torch, torchvision; print("torch", torch.__version__, "CUDA", torch.version.cuda)'

# -- this project as a wheel ---------------------------------------------------------------------------------------
FROM ${PYTHON} AS package
ARG PIP_INDEX_URL=https://pypi.org/simple
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
COPY . /source
RUN pip wheel --no-cache-dir --disable-pip-version-check --no-deps --wheel-dir /wheels /source

# -- what runs -----------------------------------------------------------------------------------------------------
FROM dependencies AS runtime
# The first user of most Linux machines has the same numbers, so files on the host belong to a person. Any other user
# will do (`--user`): nothing in the image has to be written.
RUN groupadd --gid 1000 vfl && useradd --uid 1000 --gid 1000 --no-create-home --home-dir /tmp vfl
COPY --from=package /wheels /wheels
RUN pip install --no-deps --no-index /wheels/*.whl && pip check
ENV HOME=/tmp MPLCONFIGDIR=/tmp/matplotlib PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /federation
CMD ["vfl", "--help"]
