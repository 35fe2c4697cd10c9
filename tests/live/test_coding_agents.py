"""Claude Code and Codex, each in its released version, run a task through the router over mock engines.

The engines make the calls of tools that the task lists (`tool_call: NAME {...}`): nothing outside this machine is used.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from router.cli.child_processes import FleetPlan, RouterUrls, configured_router, mock_fleet, router_config
from tests.live.engines import HOME
from tests.live.router_process import await_conversions

pytestmark = [pytest.mark.live, pytest.mark.net, pytest.mark.anyio]

PROGRAMS = HOME / "agents" / "node_modules" / ".bin"
PLAN = FleetPlan(pods=3, num_blocks=16_384, model="mock", time_scale=0.05)
DEADLINE_S = 120.0
RECEIPTS = "receipts.jsonl"
NOTE = "the kettle is blue"
CODEX_CONFIG = """
model = "mock"
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
async def fleet(folder: Path, endpoint: str) -> AsyncIterator[RouterUrls]:
    """Mock engines and a router that has proven how they convert an endpoint."""
    async with asyncio.timeout(4 * DEADLINE_S), mock_fleet(PLAN, folder) as pods:
        config = router_config(pods, PLAN) | {"receipts": {"file": str(folder / RECEIPTS)}}
        async with configured_router("router", config, folder) as urls:
            await asyncio.to_thread(await_conversions, urls.admin, endpoint)
            yield urls


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


def check_receipts(folder: Path, endpoint: str, requests: int) -> None:
    """One pod served all, each as predicted, and from the second on nearly all of the prompt was cached."""
    lines = [json.loads(line) for line in (folder / RECEIPTS).read_text().splitlines()]
    receipts = [line for line in lines if line["kind"] == "receipt"]
    assert [one["result"] for one in receipts] == ["ok"] * requests
    assert [one["endpoint"] for one in receipts] == [endpoint] * requests
    assert len({one["pod"] for one in receipts}) == 1
    assert [one["predicted_cached_tokens"] for one in receipts] == [one["cached_tokens"] for one in receipts]
    for one in receipts[1:]:
        assert one["cached_tokens"] > 0.95 * one["prompt_tokens"]


async def test_claude_code_runs_a_task(tmp_path: Path) -> None:
    """Two calls of tools, their results, a final text; then another turn of the same conversation."""
    need("claude")
    place = workplace(tmp_path)
    task = (
        f'Look.\ntool_call: Read {{"file_path": "{place}/note.txt"}}\n'
        'tool_call: Bash {"command": "wc -c note.txt", "description": "Counts"}'
    )
    options = ("--output-format", "stream-json", "--verbose", "--allowedTools", "Read", "Bash")
    names = ("MODEL", "SMALL_FAST_MODEL", "DEFAULT_HAIKU_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_OPUS_MODEL")
    quiet = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER", "IS_SANDBOX")
    async with fleet(tmp_path, "/v1/messages") as urls:
        variables = {f"ANTHROPIC_{name}": "mock" for name in names} | dict.fromkeys(quiet, "1")
        variables |= {"ANTHROPIC_BASE_URL": urls.public, "ANTHROPIC_API_KEY": "none"}
        first = await run("claude", ["-p", task, *options], place, **variables)
        (result,) = first.of_type("result")
        assert (result["subtype"], result["is_error"], result["num_turns"]) == ("success", False, 3)
        read, counted = [line["message"]["content"][0] for line in first.of_type("user")]
        assert NOTE in read["content"] and f"{len(NOTE)} note.txt" in counted["content"]
        again = await run("claude", ["--continue", "-p", "And now?", *options], place, **variables)
        assert again.of_type("result")[0]["subtype"] == "success"
        print(f"Claude Code {first.of_type('system')[0]['claude_code_version']}: {result['usage']}")
    check_receipts(tmp_path, "/v1/messages", 4)


async def test_codex_runs_a_task(tmp_path: Path) -> None:
    """Two calls of its shell, their output, a final text; then another turn of the same conversation."""
    need("codex")
    place = workplace(tmp_path)
    commands = [{"cmd": "cat note.txt"}, {"cmd": "wc -c note.txt"}]
    task = "\n".join(["Look.", *(f"tool_call: exec_command {json.dumps(command)}" for command in commands)])
    options = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    async with fleet(tmp_path, "/v1/responses") as urls:
        (tmp_path / "codex").mkdir()
        (tmp_path / "codex" / "config.toml").write_text(CODEX_CONFIG.format(url=urls.public))
        variables = {"CODEX_HOME": str(tmp_path / "codex"), "ROUTER_KEY": "none"}
        first = await run("codex", ["exec", *options, task], place, **variables)
        done = [line["item"] for line in first.of_type("item.completed")]
        ran = [item for item in done if item["type"] == "command_execution"]
        assert [item["aggregated_output"].strip() for item in ran] == [NOTE, f"{len(NOTE)} note.txt"]
        assert done[-1]["type"] == "agent_message" and done[-1]["text"]
        again = await run("codex", ["exec", "resume", "--last", *options, "And now?"], place, **variables)
        assert again.of_type("turn.completed") and not again.of_type("turn.failed")
        print(f"Codex: {first.of_type('turn.completed')[0]['usage']}")
    check_receipts(tmp_path, "/v1/responses", 4)
