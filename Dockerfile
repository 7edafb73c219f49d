# Headwater's image. `make image` builds it, `make image-test` tries it; docs/deployment.md tells more.
#
# BASE may be any Debian or Ubuntu of glibc 2.35 or later, with Python 3.10 to 3.12 or a package of it. GPUs need no
# other base: torch brings its CUDA libraries, and the container toolkit the driver. A callable that compiles with nvcc
# needs one, such as nvidia/cuda:13.0.2-devel-ubuntu24.04.
ARG BASE=python:3.11-slim

FROM ${BASE} AS base
# PyTriton's stub loads libpython by name: python images bring it, Debian and Ubuntu have it in a package of its own.
RUN if ! command -v python3 >/dev/null || ! python3 -c 'import ensurepip, venv' 2>/dev/null; then \
        apt-get update && \
        apt-get install -y --no-install-recommends ca-certificates python3 python3-venv && \
        apt-get install -y --no-install-recommends "libpython$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')" && \
        rm -rf /var/lib/apt/lists/*; \
    fi

FROM base AS build
# Of pip, where packages come from somewhere else; and the extras to install: for the demo and every kind of model.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
ARG EXTRAS=demo,hf,onnx,plan
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
RUN python3 -m venv /opt/headwater
# First without code, so that as long as no requirement changes, what they bring is taken from the cache.
COPY requirements-dev.lock pyproject.toml README.md LICENSE ./
COPY inference/pyproject.toml inference/README.md inference/
RUN mkdir app && cp LICENSE inference && /opt/headwater/bin/pip install --quiet -c requirements-dev.lock setuptools && \
    /opt/headwater/bin/pip install --quiet --no-build-isolation -c requirements-dev.lock ./inference ".${EXTRAS:+[$EXTRAS]}" && \
    rm inference/LICENSE
COPY app app
COPY inference inference
RUN /opt/headwater/bin/pip install --quiet --no-build-isolation --no-deps --force-reinstall ./inference .

FROM base
LABEL org.opencontainers.image.title="headwater" \
      org.opencontainers.image.description="Serves PyTorch models over HTTP" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /models --shell /usr/sbin/nologin headwater && \
    install -d -o headwater -g headwater /models
COPY --from=build /opt/headwater /opt/headwater
COPY configs /etc/headwater
# PYTHONDONTWRITEBYTECODE: everything is compiled, and the root file system may be read-only.
ENV PATH=/opt/headwater/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HEADWATER_SERVER__HOST=0.0.0.0
# Your models go here: it is first on the replicas' sys.path.
WORKDIR /models
USER headwater
EXPOSE 8000
# SIGTERM drains; give it `--stop-timeout` 45, more than server.shutdown_timeout_s.
STOPSIGNAL SIGTERM
# -I: what lies in /models is not imported here.
HEALTHCHECK --interval=15s --timeout=10s --start-period=180s --retries=3 CMD ["python3", "-I", "-m", "headwater_server.cli.health"]
ENTRYPOINT ["headwater"]
CMD ["serve", "/etc/headwater/demo.yaml"]
