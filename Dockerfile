# The images of the operator, the syncer and the worker, from one wheel.
#
#   docker build --target operator -t diloco-operator:0.1.0 .
#   docker build --target worker -t diloco-worker:0.1.0 --build-arg LOCKED=false --build-arg PIP_ARGS="--index-url https://…" .
#
# Packages are those of requirements/*.txt, with their hashes. LOCKED=false takes what pyproject.toml allows, from an
# index that has other builds, such as torch without CUDA.
#
# Behind a proxy with a CA of its own: --secret id=ca,src=/etc/ssl/certs/ca-certificates.crt
# (or a file mounted into the build, and --build-arg PIP_CERT=/ca.crt).

# Any image with Python 3.11 or newer; with apt where it lacks venv. The digest is that of the index for all
# architectures, from docker-library/repo-info (repos/python/remote/3.12-slim.md).
ARG BASE_IMAGE=python:3.12-slim@sha256:229a2c5bfa27522db7815ea81f9bed70af17ccb9de9fc7ad142b1877b5830d36

# pip, requirements and the wheel, for the stages below to borrow. What they borrow by COPY makes them again when it
# changes; buildah does not look into what is mounted.
FROM ${BASE_IMAGE} AS build
RUN python3 -c "import ensurepip" 2>/dev/null \
    || { apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv; }
RUN python3 -m venv /build
ARG PIP_ARGS=""
ARG PIP_CERT=""
WORKDIR /src
ARG LOCKED=true
COPY pyproject.toml scripts/requirements.py ./
COPY requirements requirements
RUN for extra in build operator syncer worker; do \
        if [ "$LOCKED" = true ]; then cp requirements/$extra.txt /build/; \
        else python3 requirements.py $extra > /build/$extra.txt; fi || exit 1; \
    done
RUN --mount=type=secret,id=ca \
    { [ ! -s /run/secrets/ca ] || export PIP_CERT=/run/secrets/ca; } \
    && /build/bin/pip install --no-cache-dir $PIP_ARGS --requirement /build/build.txt
COPY LICENSE README.md ./
COPY protos protos
COPY job job
COPY agent agent
COPY syncer syncer
COPY worker worker
COPY operator operator
COPY local local
COPY cli cli
COPY sim sim
COPY experiment experiment
RUN --mount=type=secret,id=ca \
    { [ ! -s /run/secrets/ca ] || export PIP_CERT=/run/secrets/ca; } \
    && /build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /build/dist .

FROM ${BASE_IMAGE} AS base
# torch and others ask for the name of the user.
RUN printf 'diloco:x:65532:65532::/tmp:/usr/sbin/nologin\n' >> /etc/passwd \
    && printf 'diloco:x:65532:\n' >> /etc/group
ENV PATH=/opt/diloco/venv/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1
WORKDIR /tmp
COPY scripts/image-install /opt/diloco/

FROM base AS operator
ARG PIP_ARGS=""
ARG PIP_CERT=""
COPY --from=build /build/operator.txt /opt/diloco/
RUN --mount=type=bind,from=build,source=/build,target=/build --mount=type=secret,id=ca \
    /opt/diloco/image-install requirements /opt/diloco/operator.txt
COPY --from=build /build/dist /opt/diloco/dist
RUN --mount=type=bind,from=build,source=/build,target=/build \
    /opt/diloco/image-install wheel /opt/diloco/dist/*.whl diloco diloco_job diloco_operator
ENV PYTHONSAFEPATH=1
USER 65532:65532
CMD ["python3", "-m", "diloco_operator"]
ARG VERSION=0.1.0
ARG REVISION=""
ARG SOURCE=""
LABEL org.opencontainers.image.title="diloco-operator" \
      org.opencontainers.image.description="Runs DiLoCoJobs on Kubernetes" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}"

FROM base AS syncer
ARG PIP_ARGS=""
ARG PIP_CERT=""
COPY --from=build /build/syncer.txt /opt/diloco/
RUN --mount=type=bind,from=build,source=/build,target=/build --mount=type=secret,id=ca \
    /opt/diloco/image-install requirements /opt/diloco/syncer.txt
COPY --from=build /build/dist /opt/diloco/dist
RUN --mount=type=bind,from=build,source=/build,target=/build \
    /opt/diloco/image-install wheel /opt/diloco/dist/*.whl diloco diloco_agent diloco_syncer \
    && NUMBA_CACHE_DIR=/opt/diloco/numba python3 -c \
       "from diloco.codec import formats; from diloco_syncer.merging import streaming; formats.warm_up(); streaming.warm_up()"
ENV PYTHONSAFEPATH=1
USER 65532:65532
CMD ["python3", "-m", "diloco_syncer"]
ARG VERSION=0.1.0
ARG REVISION=""
ARG SOURCE=""
LABEL org.opencontainers.image.title="diloco-syncer" \
      org.opencontainers.image.description="Merges what the learners of a DiLoCoJob send" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}"

# Without PYTHONSAFEPATH: a training loop of your own may import what lies beside it.
FROM base AS worker
ARG PIP_ARGS=""
ARG PIP_CERT=""
COPY --from=build /build/worker.txt /opt/diloco/
RUN --mount=type=bind,from=build,source=/build,target=/build --mount=type=secret,id=ca \
    /opt/diloco/image-install requirements /opt/diloco/worker.txt
COPY --from=build /build/dist /opt/diloco/dist
RUN --mount=type=bind,from=build,source=/build,target=/build \
    /opt/diloco/image-install wheel /opt/diloco/dist/*.whl diloco diloco_agent diloco_worker \
    && NUMBA_CACHE_DIR=/opt/diloco/numba python3 -m diloco.codec.kernels
USER 65532:65532
CMD ["python3"]
ARG VERSION=0.1.0
ARG REVISION=""
ARG SOURCE=""
LABEL org.opencontainers.image.title="diloco-worker" \
      org.opencontainers.image.description="Trains as a learner of a DiLoCoJob; the base for images with loops of your own" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}"
