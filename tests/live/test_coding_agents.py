"""Claude Code, Codex and Qwen Code, each in a released version, run a task through the router over mock engines.

The engines make the calls of tools that the task lists (`tool_call: NAME {...}`): nothing outside this machine is used.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.commands.child_processes import (
    JSON_CALL,
    FleetPlan,
    RouterUrls,
    configured_router,
    mock_fleet,
    router_config,
)
from tests.live.engines import HOME
from tests.live.router_process import await_conversions

pytestmark = [pytest.mark.live, pytest.mark.net, pytest.mark.anyio]

PROGRAMS = HOME / "agents" / "node_modules" / ".bin"
PLAN = FleetPlan(pods=3, num_blocks=16_384, model="mock", time_scale=0.05)
SLOW = replace(PLAN, time_scale=3.0, continues=True)
KILLED_AFTER_TOKENS = 30
LONG = "say: " + "I look at the note before I go on with what was asked of me. " * 6
SAID = "say: It is done."
DEADLINE_S = 300.0
RECEIPTS = "receipts.jsonl"
NOTE = "the kettle is blue"
NAMES = "names:\n- {name: claude-*, to: mock}\n- {name: gpt-*, to: mock}\n"
"""Programs may keep the names of hosted models."""
CODEX_CONFIG = """
model = "{model}"
model_provider = "router"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.router]
name = "router"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "ROUTER_KEY"
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a program printed: one JSON object a line."""

    lines: list[dict[str, Any]]

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["type"] == kind]


def need(program: str) -> None:
    """Skip the test where a program is not installed."""
    if not (PROGRAMS / program).exists():
        pytest.skip(f"{program} is not installed: tests/live/install.sh")


@asynccontextmanager
async def fleet(folder: Path, endpoint: str, plan: FleetPlan = PLAN) -> AsyncIterator[RouterUrls]:
    """Mock engines and a router that has proven how they convert an endpoint."""
    async with asyncio.timeout(4 * DEADLINE_S), mock_fleet(plan, folder) as pods:
        names = folder / "names.yaml"
        names.write_text(NAMES)
        config = router_config(pods, plan) | {"receipts": {"file": str(folder / RECEIPTS)}, "names": str(names)}
        async with configured_router("router", config, folder) as urls:
            if endpoint != "/v1/chat/completions":
                await asyncio.to_thread(await_conversions, urls.admin, endpoint)
            yield urls


async def kill_pods(admin: str, most: int) -> None:
    """Kill the pod of each request once, in the middle of its answer. It starts again soon."""
    async with httpx.AsyncClient(trust_env=False) as client:
        before: dict[str, float] = {}
        while most:
            pods = (await client.get(f"{admin}/admin/pods")).json()
            busy = [pod["url"] for pod in pods if pod["in_flight"]]
            if not busy:
                before = {}
            elif len(before) < 2:  # one pod has served this request until now
                written = await _written(client, busy[0])
                if written >= before.setdefault(busy[0], written) + KILLED_AFTER_TOKENS:
                    fault = {"kind": "die", "for_s": 1.0}
                    await client.post(f"{busy[0]}/_fault", json=fault, headers=JSON_CALL)
                    before["killed"], most = written, most - 1
            await asyncio.sleep(0.05)


async def _written(client: httpx.AsyncClient, pod: str) -> float:
    """Tokens that a pod has generated."""
    lines = (await client.get(f"{pod}/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


@asynccontextmanager
async def struck_fleet(folder: Path, endpoint: str, kills: int) -> AsyncIterator[RouterUrls]:
    """Slow engines that are killed while they answer."""
    async with fleet(folder, endpoint, SLOW) as urls:
        killing = asyncio.create_task(kill_pods(urls.admin, kills))
        try:
            yield urls
        finally:
            killing.cancel()


async def run(program: str, arguments: Sequence[str], folder: Path, **variables: str) -> Ran:
    """Run a program in `folder`, with nothing of this user's environment, until it ends."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder.parent), "TERM": "xterm", **variables}
    ended = await asyncio.to_thread(
        subprocess.run,
        [str(PROGRAMS / program), *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == 0, (ended.stdout[-2000:], ended.stderr[-2000:])
    return Ran([json.loads(line) for line in ended.stdout.splitlines() if line.startswith(b"{")])


def workplace(tmp_path: Path) -> Path:
    """A folder with a note."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "note.txt").write_text(NOTE)
    return folder


def receipts_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / RECEIPTS).read_text().splitlines()]
    return [line for line in lines if line["kind"] == "receipt"]


def check_receipts(folder: Path, endpoint: str, requests: int, name: str) -> None:
    """One pod served all by this name, as predicted, and from the second on nearly all of the prompt was cached."""
    receipts = receipts_of(folder)
    assert {(one["name"], one["model"]) for one in receipts} == {(name, "mock")}
    assert [one["result"] for one in receipts] == ["ok"] * requests
    assert [one["endpoint"] for one in receipts] == [endpoint] * requests
    assert len({one["pod"] for one in receipts}) == 1
    assert [one["predicted_cached_tokens"] for one in receipts] == [one["cached_tokens"] for one in receipts]
    for one in receipts[1:]:
        assert one["cached_tokens"] > 0.95 * one["prompt_tokens"]


def claude_options(urls: RouterUrls, model: str = "") -> tuple[Sequence[str], dict[str, str]]:
    """Arguments and environment. Without `model` it asks for the models of Anthropic."""
    names = ("MODEL", "SMALL_FAST_MODEL", "DEFAULT_HAIKU_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_OPUS_MODEL")
    quiet = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER", "IS_SANDBOX")
    variables = {f"ANTHROPIC_{name}": model for name in names if model} | dict.fromkeys(quiet, "1")
    variables |= {"ANTHROPIC_BASE_URL": urls.public, "ANTHROPIC_API_KEY": "none"}
    return ("--output-format", "stream-json", "--verbose", "--allowedTools", "Read", "Bash"), variables


def claude_task(place: Path, *said: str) -> str:
    """Two calls of tools. `said`: in front of each, and at the end."""
    read = f'tool_call: Read {{"file_path": "{place}/note.txt"}}'
    count = 'tool_call: Bash {"command": "wc -c note.txt", "description": "Counts"}'
    return "\n".join(["Look.", *said, read, *said, count, *said])


def codex_options(folder: Path, urls: RouterUrls, model: str = "gpt-5-codex") -> tuple[Sequence[str], dict[str, str]]:
    (folder / "codex").mkdir()
    (folder / "codex" / "config.toml").write_text(CODEX_CONFIG.format(url=urls.public, model=model))
    options = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    return options, {"CODEX_HOME": str(folder / "codex"), "ROUTER_KEY": "none"}


def codex_task(*said: str) -> str:
    """Two calls of its shell. `said`: in front of each."""
    commands = [{"cmd": "cat note.txt"}, {"cmd": "wc -c note.txt"}]
    calls = [f"tool_call: exec_command {json.dumps(command)}" for command in commands]
    return "\n".join(["Look.", *said, calls[0], *said, calls[1]])


def check_codex(first: Ran) -> None:
    done = [line["item"] for line in first.of_type("item.completed")]
    ran = [item for item in done if item["type"] == "command_execution"]
    assert [item["aggregated_output"].strip() for item in ran] == [NOTE, f"{len(NOTE)} note.txt"]
    assert done[-1]["type"] == "agent_message" and done[-1]["text"]


def check_claude(first: Ran) -> None:
    (result,) = first.of_type("result")
    assert (result["subtype"], result["is_error"], result["num_turns"]) == ("success", False, 3)
    read, counted = [line["message"]["content"][0] for line in first.of_type("user")]
    assert NOTE in read["content"] and f"{len(NOTE)} note.txt" in counted["content"]


async def test_claude_code_runs_a_task(tmp_path: Path) -> None:
    """By names of Anthropic: two calls of tools, their results, a final text; then another turn of the conversation."""
    need("claude")
    place = workplace(tmp_path)
    async with fleet(tmp_path, "/v1/messages") as urls:
        options, variables = claude_options(urls)
        first = await run("claude", ["-p", claude_task(place, SAID), *options], place, **variables)
        check_claude(first)
        again = await run("claude", ["--continue", "-p", f"And now?\n{SAID}", *options], place, **variables)
        assert again.of_type("result")[0]["subtype"] == "success"
        usage = first.of_type("result")[0]["usage"]
        print(f"Claude Code {first.of_type('system')[0]['claude_code_version']}: {usage}")
    check_receipts(tmp_path, "/v1/messages", 4, "claude-*")


async def test_codex_runs_a_task(tmp_path: Path) -> None:
    """By a name of OpenAI: two calls of its shell, their output, a final text; then another turn."""
    need("codex")
    place = workplace(tmp_path)
    async with fleet(tmp_path, "/v1/responses") as urls:
        options, variables = codex_options(tmp_path, urls)
        first = await run("codex", ["exec", *options, codex_task()], place, **variables)
        check_codex(first)
        again = await run("codex", ["exec", "resume", "--last", *options, "And now?"], place, **variables)
        assert again.of_type("turn.completed") and not again.of_type("turn.failed")
        print(f"Codex: {first.of_type('turn.completed')[0]['usage']}")
    check_receipts(tmp_path, "/v1/responses", 4, "gpt-*")


async def test_qwen_code_notices_nothing_of_pods_that_are_killed(tmp_path: Path) -> None:
    """Its answers are sampled and call tools; each pod is killed in front of the call."""
    need("qwen")
    place = workplace(tmp_path)
    read = f'tool_call: read_file {{"absolute_path": "{place}/note.txt"}}'
    count = 'tool_call: run_shell_command {"command": "wc -c note.txt", "is_background": false}'
    task = "\n".join(["Look.", LONG, read, LONG, count, LONG])
    async with struck_fleet(tmp_path, "/v1/chat/completions", 3) as urls:
        variables = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{urls.public}/v1", "OPENAI_MODEL": "mock"}
        options = ("--auth-type", "openai", "--yolo", "--output-format", "stream-json")
        ran = await run("qwen", [*options, "-p", task], place, **variables)
    (result,) = ran.of_type("result")
    assert (result["subtype"], result["is_error"], result["num_turns"]) == ("success", False, 3)
    said = [line["message"]["content"][0]["content"].strip() for line in ran.of_type("user")]
    assert said == [NOTE, f"{len(NOTE)} note.txt"]
    receipts = receipts_of(tmp_path)
    assert [one["result"] for one in receipts] == ["ok"] * 3
    assert [one["continued"] for one in receipts] == [["ids"]] * 3


async def test_claude_code_notices_nothing_of_pods_that_are_killed(tmp_path: Path) -> None:
    """Its messages are sampled and call tools; the pods are killed in front of the calls."""
    need("claude")
    place = workplace(tmp_path)
    async with struck_fleet(tmp_path, "/v1/messages", 2) as urls:
        options, variables = claude_options(urls, "mock")
        check_claude(await run("claude", ["-p", claude_task(place, LONG), *options], place, **variables))
    receipts = receipts_of(tmp_path)
    assert [one["result"] for one in receipts] == ["ok"] * 3
    assert [one.get("continued") for one in receipts] == [["ids"], ["ids"], None]


async def test_codex_asks_again_where_its_sampled_stream_is_cut(tmp_path: Path) -> None:
    need("codex")
    place = workplace(tmp_path)
    async with struck_fleet(tmp_path, "/v1/responses", 1) as urls:
        options, variables = codex_options(tmp_path, urls, "mock")
        check_codex(await run("codex", ["exec", *options, codex_task(LONG)], place, **variables))
    check_cut(tmp_path)


def check_cut(folder: Path) -> None:
    """Streams were cut, and their requests came again."""
    results = [one["result"] for one in receipts_of(folder)]
    assert results.count("ok") == 3 and "upstream_broken" in results
