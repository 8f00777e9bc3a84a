# The images of a federation.
#
#   deploy/build-images                        # vfl-server and vfl, with labels; TORCH=cpu or cuda for the second
#   docker build --target server -t vfl-server .
#   docker build -t vfl .                      # vfl-party and vfl; has vfl-server and the hub, too
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
# It builds with and without BuildKit; without it, all stages above the target are built. What changes rarely comes
# first: torch, the other libraries, this project.
ARG PYTHON=python:3.11-slim-bookworm

# -- what all images have ------------------------------------------------------------------------------------------
FROM ${PYTHON} AS base
# The first user of most Linux machines has the same numbers, so files on the host belong to a person. Any other user
# will do (`--user`): nothing in the image has to be written.
RUN groupadd --gid 1000 vfl && useradd --uid 1000 --gid 1000 --no-create-home --home-dir /tmp vfl
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/vfl
ENV PATH=/opt/vfl/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1
WORKDIR /federation

# -- this project as wheels: vfl, and the server alone -------------------------------------------------------------
FROM base AS wheels
ARG PIP_INDEX_URL=https://pypi.org/simple
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
COPY . /source
RUN pip wheel --no-deps --wheel-dir /wheels /source /source/deploy/server

# -- the server, without torch -------------------------------------------------------------------------------------
FROM base AS server
ARG PIP_INDEX_URL=https://pypi.org/simple
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
COPY deploy/leave-out deploy/locks/requirements-server.txt /install/
RUN pip install --no-deps --require-hashes -r /install/requirements-server.txt && /install/leave-out /opt/vfl
COPY --from=wheels /wheels/vfl_server-*.whl /install/
RUN pip install --no-deps --no-index /install/*.whl && pip check
ARG VERSION
ARG REVISION
ARG SOURCE
LABEL org.opencontainers.image.title="vfl-server" \
      org.opencontainers.image.description="The aggregation server of a vertical federation" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}"
USER 1000:1000
CMD ["vfl-server", "--help"]

# -- a party's libraries, and the hub's ----------------------------------------------------------------------------
FROM base AS libraries
COPY deploy/install-torch deploy/leave-out deploy/locks/requirements-cuda.txt /install/
ARG PIP_INDEX_URL=https://pypi.org/simple
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
ARG TORCH=auto
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
RUN /install/install-torch /install/requirements-cuda.txt && /install/leave-out /opt/vfl
COPY deploy/locks/requirements-cpu.txt deploy/locks/requirements-hub.txt /install/
RUN pip install --no-deps --require-hashes -r /install/requirements-hub.txt && /install/leave-out /opt/vfl && \
    python -c 'import torch, torchvision; print("torch", torch.__version__, "CUDA", torch.version.cuda)'

# -- a party -------------------------------------------------------------------------------------------------------
FROM libraries AS party
COPY --from=wheels /wheels/vfl-*.whl /install/
RUN pip install --no-deps --no-index /install/*.whl && pip check
ENV MPLCONFIGDIR=/tmp/matplotlib
ARG VERSION
ARG REVISION
ARG SOURCE
LABEL org.opencontainers.image.title="vfl" \
      org.opencontainers.image.description="A party of a vertical federation, and the tools for people" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}"
USER 1000:1000
CMD ["vfl", "--help"]
