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
# It builds with and without BuildKit. What changes rarely comes first: torch, the other libraries, this project.
ARG PYTHON=python:3.11-slim-bookworm

# -- the libraries' names, so that no other change of pyproject.toml installs them anew ----------------------------
FROM ${PYTHON} AS requirements
WORKDIR /requirements
COPY pyproject.toml .
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
    >requirements.txt && grep -E '^torch(vision)?[^a-z]' requirements.txt >torch.txt

# -- the libraries -------------------------------------------------------------------------------------------------
FROM ${PYTHON} AS dependencies
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/vfl
ENV PATH=/opt/vfl/bin:$PATH
COPY --from=requirements /requirements/torch.txt /install/
COPY deploy/install-torch /install/
ARG PIP_INDEX_URL=https://pypi.org/simple
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
ARG TORCH=auto
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
RUN /install/install-torch /install/torch.txt
COPY --from=requirements /requirements/requirements.txt /install/
RUN pip install -r /install/requirements.txt

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
RUN pip install --no-deps --no-index /wheels/*.whl
ENV HOME=/tmp MPLCONFIGDIR=/tmp/matplotlib PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /federation
CMD ["vfl", "--help"]
