# syntax=docker/dockerfile:1
# Three images from one file: edge (a device), coordinator, export (the only one with PyTorch).
#   docker build --target coordinator --tag embrace-coordinator .
ARG PYTHON=3.12

# --- the page at /join ------------------------------------------------------------------------------------------------
FROM node:22-slim AS web
WORKDIR /source/browser
COPY browser/package.json browser/package-lock.json browser/.npmrc ./
RUN npm ci
COPY browser ./
RUN npm run build

# --- the project as one wheel ---------------------------------------------------------------------------------------
FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY pyproject.toml LICENSE README.md ./
COPY bench bench
COPY coordinator coordinator
COPY --from=web /source/coordinator/web coordinator/web
COPY edge_runtime edge_runtime
COPY embrace embrace
COPY federation federation
COPY model_export model_export
COPY simulation simulation
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# --- what all images share: an interpreter, and a user who is not root -----------------------------------------------
FROM python:${PYTHON}-slim AS base
RUN useradd --system --uid 10001 --home-dir /data --shell /usr/sbin/nologin embrace \
    && install --directory --owner embrace --group embrace --mode 0700 /data
ENV PATH=/opt/embrace/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /data

# --- environments, built where pip and its leftovers stay behind ----------------------------------------------------
FROM base AS environment
COPY constraints.txt /constraints.txt
COPY --from=wheel /wheels /wheels
RUN python -m venv /opt/embrace

FROM environment AS edge-environment
RUN pip install --no-cache-dir --constraint /constraints.txt "$(echo /wheels/*.whl)[edge,images]" \
    && pip uninstall --yes pip

FROM environment AS coordinator-environment
RUN pip install --no-cache-dir --constraint /constraints.txt "$(echo /wheels/*.whl)[coordinator,scale]" \
    && pip uninstall --yes pip

FROM environment AS export-environment
# PyTorch without CUDA is much smaller: --build-arg PIP_EXTRA_INDEX_URL=... with the index that PyTorch's pages name.
ARG PIP_EXTRA_INDEX_URL=
RUN pip install --no-cache-dir --constraint /constraints.txt "$(echo /wheels/*.whl)[export]" \
    && pip uninstall --yes pip

# --- the images ------------------------------------------------------------------------------------------------------
FROM base AS export
COPY --from=export-environment /opt/embrace /opt/embrace
USER 10001
ENTRYPOINT ["embrace"]
CMD ["export", "--help"]

FROM base AS edge
COPY --from=edge-environment /opt/embrace /opt/embrace
USER 10001
VOLUME /data
ENTRYPOINT ["embrace"]
CMD ["agent", "--help"]

FROM base AS coordinator
COPY --from=coordinator-environment /opt/embrace /opt/embrace
USER 10001
VOLUME /data
EXPOSE 8470
# It listens to other containers; without a certificate it refuses to, unless EMBRACE_INSECURE=true says so.
ENV EMBRACE_HOST=0.0.0.0
STOPSIGNAL SIGTERM
# With a certificate in the container, give --health-cmd of your own: this one speaks plain HTTP.
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8470/healthz', timeout=4)"]
ENTRYPOINT ["embrace"]
CMD ["serve", "--data", "/data", "--devices", "0"]
