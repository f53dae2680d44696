# The dashboard and the gateway. compose.yaml has their commands.
FROM python:3.12-slim-bookworm AS build
COPY pyproject.toml README.md LICENSE /src/
COPY shared /src/shared
COPY producer /src/producer
COPY worker /src/worker
RUN python -m venv /opt/stoker && /opt/stoker/bin/pip install --no-cache-dir "/src[dashboard,serve]" \
    "rq-dashboard==0.9.0" "rq==3.0.0" "flask==3.1.3" \
    "starlette==1.10.0" "uvicorn==0.54.0" "python-multipart==0.0.34"

FROM python:3.12-slim-bookworm
COPY --from=build /opt/stoker /opt/stoker
# A new volume that is mounted on a folder gets the folder's owner.
RUN install --directory --owner=1000 --group=1000 /data
ENV PATH=/opt/stoker/bin:$PATH STOKER_REDIS_URL=redis://queue:6379
USER 1000:1000
ENTRYPOINT ["stoker"]
