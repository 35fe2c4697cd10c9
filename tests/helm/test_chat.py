"""`helm test` passes against a router that runs as the chart would start it, and fails where nothing is cached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.helm.charts import Object, Rendered, merged, minimal
from tests.helm.mounted_files import below, build
from tests.redis_servers.server import free_port

pytestmark = pytest.mark.net
DEADLINE_S = 120


@contextmanager
def process(*arguments: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """`warmroute` with these arguments; its standard output can be read."""
    command = [sys.executable, "-m", "router.cli", *arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, env=environment) as started:
        try:
            yield started
        finally:
            started.terminate()
            started.wait(DEADLINE_S)


def container(rendered: Rendered, kind: str, name: str) -> Object:
    [found] = [
        one for _, pod in rendered.pods() for one in pod["containers"] if one["name"] == name and rendered.all(kind)
    ]
    assert isinstance(found, dict)
    return found


@contextmanager
def running(tmp_path: Path, *engine_arguments: str) -> Iterator[Rendered]:
    """Mock engines, and a router with the command, configuration and files of the chart."""
    port = free_port()
    pool = {"name": "chat", "engine": "mock", "servedModelName": "demo", "port": port, "args": [*engine_arguments]}
    engines = container(minimal({"engines": {"pools": [pool]}}), "Deployment", "engine")
    with process(*engines["args"], "--host=127.0.0.1", folder=tmp_path) as engine:
        assert engine.stdout is not None
        pod = json.loads(engine.stdout.readline())["url"]
        listen, admin = free_port(), free_port()
        ports = {"listen": {"host": "127.0.0.1", "port": listen}, "admin": {"host": "127.0.0.1", "port": admin}}
        limits = {"limits": {"drain_delay_s": 0, "drain_timeout_s": 1}}
        config = {"pods": [{"url": pod}], "unlisted_models": "engine", **ports, **limits}
        rendered = minimal({"config": config, "service": {"port": listen}})
        build(rendered, rendered.one("Deployment")["spec"]["template"]["spec"], "router", tmp_path)
        arguments = [below(tmp_path, one) for one in container(rendered, "Deployment", "router")["args"]]
        with process(*arguments, folder=tmp_path):
            yield rendered


def helm_test(rendered: Rendered, seconds: int) -> subprocess.CompletedProcess[str]:
    """Run the command of the test pod, at this machine's address."""
    pod = container(rendered, "Pod", "chat")
    url, model, _, tenants = pod["args"]
    local = [f"http://127.0.0.1:{url.rpartition(':')[2]}", model, str(seconds), tenants]
    command = [sys.executable, *pod["command"][1:], *local]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_the_second_turn_is_a_cache_hit(tmp_path: Path) -> None:
    with running(tmp_path, "--time-scale=0") as rendered:
        done = helm_test(rendered, DEADLINE_S // 2)
    assert done.returncode == 0, done.stderr
    assert "second turn on 127.0.0.1:" in done.stdout


def test_a_router_that_does_not_answer_fails_the_test() -> None:
    done = helm_test(minimal({"service": {"port": free_port()}}), 1)
    assert done.returncode == 1
    assert "Connection refused" in done.stderr


@pytest.mark.parametrize(("status", "ends"), [(401, 0), (200, 1)])
def test_with_tenants_and_no_key_a_refusal_passes(status: int, ends: int) -> None:
    """A request without a key that is answered fails it."""

    class Router(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Router) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        values = {"tenants": {"existingSecret": "t"}, "service": {"port": server.server_port}}
        done = helm_test(minimal(values), 0)
        server.shutdown()
    assert done.returncode == ends
    assert ("test.apiKeySecret" in done.stdout) is not bool(ends)


def test_the_chat_has_the_key_of_a_tenant() -> None:
    values = {"tenants": {"existingSecret": "t"}, "test": {"apiKeySecret": {"name": "k", "key": "api"}}}
    pod = container(minimal(values), "Pod", "chat")
    assert pod["env"] == [{"name": "API_KEY", "valueFrom": {"secretKeyRef": {"name": "k", "key": "api"}}}]


def test_values_merge_as_in_helm() -> None:
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}) == {"a": {"b": 3, "c": 2}}
