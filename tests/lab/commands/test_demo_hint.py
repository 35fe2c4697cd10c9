"""`warmroute demo --keep` leaves a router and its page running, and proposes a request that a prefix decides."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from pathlib import Path

import httpx
import pytest

from loadtest.commands.child_processes import FleetPlan, RouterUrls, mock_fleet
from loadtest.commands.demo import ADMIN_PORT, _keep, _usage_hint
from loadtest.commands.mock_engine_command import mock_tokenizer

ROOT = Path(__file__).parents[3]
DEADLINE_S = 300.0
"""Engines and router may each need `READY_TIMEOUT_S` on a busy machine."""


def test_the_proposed_request_is_long_streamed_and_reports_its_cached_tokens(tmp_path: Path) -> None:
    """A short prompt would be decided by the hash of its first blocks, and `explain` would have no cost to show."""
    hint = _usage_hint(RouterUrls("http://r:1", "http://a:2"), "demo")
    commands = hint[hint.index("for turn") : hint.index("\n\nPage: ")]
    for name in ("curl", "warmroute"):
        stub = tmp_path / name
        stub.write_text('#!/bin/sh\nfor last; do :; done\nprintf "%s\\n" "$last"\n')
        stub.chmod(0o755)
    found = subprocess.run(
        ["bash", "-c", commands.replace("| tail -n 3", "| tr -d '\\n'; echo")],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    body = json.loads(found[0])
    assert found == [found[0], found[0], "http://a:2"]
    assert body["stream"] and body["stream_options"]["include_usage"]
    assert 1500 < len(mock_tokenizer().encode(body["messages"][0]["content"], add_special_tokens=False)) < 1700
    assert "http://a:2/ui" in hint


@pytest.mark.net
@pytest.mark.anyio
async def test_the_page_of_the_router_that_is_kept_is_at_the_printed_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """README has the same address, for a machine where its port is free."""
    plan, printed = FleetPlan(pods=1, num_blocks=256), ""
    async with asyncio.timeout(DEADLINE_S), mock_fleet(plan, tmp_path) as pods:
        kept = asyncio.create_task(_keep(pods, plan, tmp_path))
        while "Page: " not in printed and not kept.done():
            await asyncio.sleep(0.05)
            printed += capsys.readouterr().out
        found = re.search(r"^Page: (http://127\.0\.0\.1:\d+)/ui ", printed, re.MULTILINE)
        assert found is not None
        async with httpx.AsyncClient(base_url=found[1], trust_env=False) as client:
            page, listed = await client.get("/ui"), (await client.get("/admin/pods")).json()
        kept.cancel()
        await asyncio.wait([kept])
    assert page.text.startswith("<!doctype html>") and [pod["state"] for pod in listed] == ["ready"]
    assert f"http://127.0.0.1:{ADMIN_PORT}/ui" in (ROOT / "README.md").read_text().partition("`--keep`")[2][:300]
