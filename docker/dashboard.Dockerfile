FROM python:3.12-slim
# rq-dashboard 0.9.0 imports six and does not say so.
RUN pip install --no-cache-dir "rq-dashboard==0.9.0" "six==1.17.0" "rq==3.0.0"
COPY dashboard.py /app/dashboard.py
USER nobody
# All interfaces of the container; compose.yaml publishes the port on loopback only.
CMD ["python", "/app/dashboard.py", "--bind", "0.0.0.0", "--port", "9181", "--json", "--redis-url", "redis://queue:6379"]
