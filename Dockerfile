# Two images: `control` (gateway, scheduler; no torch) and `cpu` (the same with a worker and the grammar service).
#
#   docker build --target control -t v4mesh:0.1.0-control .
#   docker build --target cpu     -t v4mesh:0.1.0-cpu .
#
# Pin BASE by digest for a deployment. PIP_ARGS is handed to pip: where the index serves torch with CUDA, name one with
# CPU builds. No compiler is needed: every dependency comes as a wheel.

ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG PIP_ARGS=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/v4mesh
WORKDIR /src
COPY . .
RUN /opt/v4mesh/bin/pip install --quiet -c constraints.txt ${PIP_ARGS} '.[gateway,scheduler]'

FROM build AS build-cpu
ARG PIP_ARGS=
# xgrammar names triton (200 MB), which the grammar service never uses.
RUN /opt/v4mesh/bin/pip install --quiet -c constraints.txt ${PIP_ARGS} '.[cpu]' transformers apache-tvm-ffi pydantic \
 && /opt/v4mesh/bin/pip install --quiet -c constraints.txt ${PIP_ARGS} --no-deps xgrammar

FROM ${BASE} AS runtime
RUN useradd --system --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin v4mesh
ENV PATH=/opt/v4mesh/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 10001:10001
HEALTHCHECK NONE
LABEL org.opencontainers.image.title="v4mesh" org.opencontainers.image.licenses="Apache-2.0"
CMD ["v4mesh", "--help"]

FROM runtime AS control
COPY --from=build /opt/v4mesh /opt/v4mesh

FROM runtime AS cpu
COPY --from=build-cpu /opt/v4mesh /opt/v4mesh
