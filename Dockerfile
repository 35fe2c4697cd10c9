# The router alone: no engine, no torch. Build: docker build -t warmroute .
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY router router
COPY policies policies
COPY config config
RUN python -m venv /opt/warmroute && /opt/warmroute/bin/pip install --no-cache-dir -c constraints.txt .

FROM python:3.12-slim
RUN useradd --uid 10001 --no-create-home warmroute
COPY --from=build /opt/warmroute /opt/warmroute
USER 10001
ENV PATH=/opt/warmroute/bin:$PATH PYTHONUNBUFFERED=1
EXPOSE 8080 9480
ENTRYPOINT ["warmroute"]
CMD ["serve", "--config", "/etc/warmroute/router.yaml", "--host", "0.0.0.0"]
