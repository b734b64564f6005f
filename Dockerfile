# Two images: --target operator (no torch) and --target trainer. docs/images.md tells how to build them and
# what the arguments do. Needs BuildKit (docker 23 or newer), podman 4.3 or buildah 1.28.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# A folder of wheels takes this stage's place: --build-context wheels=FOLDER
FROM scratch AS wheels
COPY constraints.txt /

FROM ${PYTHON_IMAGE} AS python
ENV PATH=/opt/bamboo/bin:$PATH \
    HOME=/tmp \
    USER=bamboo \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
RUN echo 'bamboo:x:65532:65532:Bamboo:/tmp:/usr/sbin/nologin' >>/etc/passwd \
 && echo 'bamboo:x:65532:' >>/etc/group

FROM python AS build
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PIP_CONSTRAINT=/src/constraints.txt
WORKDIR /src
RUN python -m venv --without-pip /opt/bamboo
COPY constraints.txt .
# What the distributions depend on, one requirement a line, without the distributions themselves. --extras: also what
# brings object stores, which are extras of the core.
RUN printf '%s\n' 'import sys, tomllib' \
    'extras = sys.argv[1] == "--extras"' \
    'for path in sys.argv[1 + extras:]:' \
    '    project = tomllib.load(open(path, "rb"))["project"]' \
    '    optional = project.get("optional-dependencies", {}) if extras and path.startswith("core") else {}' \
    '    stores = [lines for name, lines in optional.items() if name in ("s3", "gs", "az")]' \
    '    for line in sum(stores, project["dependencies"]):' \
    '        if not line.startswith("bamboo"):' \
    '            print(line)' >requirements.py

# What comes from elsewhere and what is ours are layers of their own: the first ones stay as they are for long. Of
# Kubernetes' client the typed calls go, 120 MB that nothing here uses.

FROM build AS operator-packages
ARG PIP_ARGS=""
COPY core/pyproject.toml core/
COPY client/pyproject.toml client/
COPY operator/pyproject.toml operator/
RUN --mount=type=bind,from=wheels,target=/wheels \
    python requirements.py core/pyproject.toml client/pyproject.toml operator/pyproject.toml >requirements.txt \
 && pip --python /opt/bamboo install --find-links /wheels $PIP_ARGS -r requirements.txt \
 && cd /opt/bamboo/lib/python3.11/site-packages \
 && find kubernetes -path '*/client/*' \( -path '*/api/*' -o -path '*/models/*' \) -type f ! -name '__init__.*' -delete

FROM operator-packages AS operator-own
ARG PIP_ARGS=""
COPY core core
COPY client client
COPY operator operator
RUN --mount=type=bind,from=wheels,target=/wheels \
    pip --python /opt/bamboo install --find-links /wheels $PIP_ARGS --root /own --no-deps ./core ./client ./operator

FROM build AS trainer-packages
ARG PIP_ARGS=""
ARG TORCH_ARGS=""
COPY core/pyproject.toml core/
COPY client/pyproject.toml client/
COPY trainer/pyproject.toml trainer/
# torch alone, so that TORCH_ARGS may name an index that has nothing else; then off with what only tests are made of.
RUN --mount=type=bind,from=wheels,target=/wheels \
    python requirements.py --extras core/pyproject.toml client/pyproject.toml trainer/pyproject.toml >requirements.txt \
 && pip --python /opt/bamboo install --find-links /wheels $PIP_ARGS $TORCH_ARGS --no-deps torch \
 && pip --python /opt/bamboo install --find-links /wheels $PIP_ARGS -r requirements.txt \
 && cd /opt/bamboo/lib/python3.11/site-packages \
 && find torch/bin -type f ! -name torch_shm_manager -delete \
 && rm -rf torch/test \
 && find kubernetes -path '*/client/*' \( -path '*/api/*' -o -path '*/models/*' \) -type f ! -name '__init__.*' -delete \
 && find networkx sympy -type d -name tests -prune -exec rm -rf {} +

FROM trainer-packages AS trainer-own
ARG PIP_ARGS=""
COPY core core
COPY client client
COPY trainer trainer
RUN --mount=type=bind,from=wheels,target=/wheels \
    pip --python /opt/bamboo install --find-links /wheels $PIP_ARGS --root /own --no-deps ./core ./client ./trainer

FROM python AS operator
COPY LICENSE /licenses/LICENSE
COPY --from=operator-packages /opt/bamboo /opt/bamboo
COPY --from=operator-own /own/opt/bamboo /opt/bamboo
LABEL org.opencontainers.image.title="bamboo-operator" \
      org.opencontainers.image.description="Bamboo's Kubernetes operator: runs BambooJobs on spot nodes" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
USER 65532:65532
EXPOSE 8765 8080
ENTRYPOINT ["bamboo-operator"]

FROM python AS trainer
COPY LICENSE /licenses/LICENSE
COPY --from=trainer-packages /opt/bamboo /opt/bamboo
COPY constraints.txt /opt/bamboo/
COPY --from=trainer-own /own/opt/bamboo /opt/bamboo
LABEL org.opencontainers.image.title="bamboo-trainer" \
      org.opencontainers.image.description="Bamboo's trainer: pipeline engine, redundancy and takeover on PyTorch" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
USER 65532:65532
EXPOSE 8080
ENTRYPOINT ["python", "-m", "bamboo_trainer"]
