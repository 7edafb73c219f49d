# The image, with what the tests need, as the same user: `make image-suite` runs them in it.
ARG IMAGE=headwater
FROM ${IMAGE}
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
USER root
WORKDIR /src
# Some tests are what a user with curl does.
RUN command -v curl >/dev/null || \
    (apt-get update && apt-get install -y --no-install-recommends curl && rm -rf /var/lib/apt/lists/*)
COPY requirements-dev.lock ./
RUN pip install --quiet -r requirements-dev.lock
COPY . .
RUN chown headwater:headwater /src
USER headwater
HEALTHCHECK NONE
# The tests choose their own addresses, and build environments of their own.
ENTRYPOINT ["env", "-u", "HEADWATER_SERVER__HOST", "python3", "-m", "pytest", "-p", "no:cacheprovider"]
CMD ["tests"]
