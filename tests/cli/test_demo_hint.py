"""The first request that `warmroute demo --keep` proposes shows why a prefix matters."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from router.cli.child_processes import RouterUrls
from router.cli.demo import _usage_hint
from router.cli.mock_engine_command import mock_tokenizer


def test_the_proposed_request_is_long_streamed_and_reports_its_cached_tokens(tmp_path: Path) -> None:
    """Of a short prompt, the hash of its first blocks decides, and `explain` has no cost to show."""
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
