FROM python:3.12-slim
COPY pyproject.toml README.md LICENSE /src/
COPY shared /src/shared
COPY producer /src/producer
COPY worker /src/worker
RUN pip install --no-cache-dir "/src[dashboard]" "rq-dashboard==0.9.0" "rq==3.0.0" "flask==3.1.3"
USER nobody
# It listens on all interfaces of the container; compose.yaml publishes the port on loopback only.
CMD ["stoker", "--redis", "redis://queue:6379", "dashboard", "--bind", "0.0.0.0", "--allow-remote"]
