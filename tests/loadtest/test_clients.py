"""Is a client run as it should be, and is one that is missing or fails explained?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.clients import CLIENTS, Ask, ClientError, found_executable, measured

ASK = Ask(
    url="http://127.0.0.1:8080",
    model="demo",
    tokenizer=Path("/tokenizer"),
    requests=2,
    rate_per_s=4.0,
    prompt_tokens=600,
    prefix_tokens=512,
    prefixes=5,
    output_tokens=32,
    trace=None,
    speedup=1.0,
)
SAVED = {
    "start_times": [100.0, 102.0],
    "ttfts": [0.05, 0.05],
    "latencies": [0.3, 0.5],
    "input_lens": [579, 578],
    "output_lens": [16, 16],
    "errors": ["", ""],
}


def installed(folder: Path, script: str) -> Path:
    """A stand-in for vLLM; its last argument is the file that it leaves. The Python beside it."""
    executable = folder / "vllm"
    executable.write_text(f"#!/bin/sh\nfor last; do :; done\n{script}\n")
    executable.chmod(0o755)
    return folder / "python"


def test_what_a_client_leaves_becomes_a_run(tmp_path: Path) -> None:
    """At the rate that was asked, with the tokens that it did not count unknown."""
    python = installed(tmp_path, f"echo '{json.dumps(SAVED)}' > \"$last\"")
    run = measured(CLIENTS["vllm"], ASK, python)
    assert (run.name, run.rate_per_s, run.planned, len(run.requests)) == ("vllm", 4.0, 2, 2)
    assert run.wall_s == 2.5
    assert not run.cached_known


def test_with_a_trace_the_rate_is_the_traces(tmp_path: Path) -> None:
    """Two requests within two seconds."""
    python = installed(tmp_path, f"echo '{json.dumps(SAVED)}' > \"$last\"")
    assert measured(CLIENTS["vllm"], replace(ASK, trace=tmp_path / "trace.jsonl"), python).rate_per_s == 1.0


def test_it_runs_offline(tmp_path: Path) -> None:
    """No client may go looking for a tokenizer."""
    python = installed(tmp_path, f'[ "$HF_HUB_OFFLINE" = 1 ] && echo \'{json.dumps(SAVED)}\' > "$last"')
    assert measured(CLIENTS["vllm"], ASK, python).requests


@pytest.mark.parametrize("script", ["echo no such flag >&2; exit 2", "echo no such flag"])
def test_a_client_that_fails_or_leaves_nothing_shows_its_last_words(tmp_path: Path, script: str) -> None:
    """An exit code of 0 proves nothing."""
    with pytest.raises(ClientError, match="no such flag"):
        measured(CLIENTS["vllm"], ASK, installed(tmp_path, script))


def test_a_client_that_is_missing_comes_with_the_way_to_install_it(tmp_path: Path) -> None:
    """In an environment of its own: it weighs a gigabyte."""
    with pytest.raises(ClientError, match="pip install aiperf"):
        found_executable(CLIENTS["aiperf"], tmp_path / "python")
