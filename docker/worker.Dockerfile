# A worker on a Linux CPU: for trying stoker, and for small models. On a Mac, run the worker itself: a container there
# has no access to Metal.
FROM python:3.12-slim-bookworm AS build
COPY pyproject.toml README.md LICENSE /src/
COPY shared /src/shared
COPY producer /src/producer
COPY worker /src/worker
RUN python -m venv /opt/stoker && /opt/stoker/bin/pip install --no-cache-dir "/src[worker]" \
    "mlx==0.32.4" "mlx-lm==0.32.2"

FROM python:3.12-slim-bookworm
# Without OpenBLAS, MLX's products of float32 matrices take about thirty times as long. Debian keeps only one version.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends libopenblas0-pthread \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/stoker /opt/stoker
RUN useradd --uid 1000 stoker && install --directory --owner=1000 --group=1000 /store /models
ENV PATH=/opt/stoker/bin:$PATH HF_HOME=/models \
    STOKER_REDIS_URL=redis://queue:6379 STOKER_STORE=/store STOKER_METRICS_PORT=9410
USER 1000:1000
ENTRYPOINT ["stoker-worker", "run"]
