"""Established clients are run, and missing or failing clients are explained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.fleets.clients import CLIENTS, ClientError, ClientJob, find_executable, run_client

JOB = ClientJob(
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
    """A substitute for vLLM whose last argument is its result file; returns the path of the Python next to it."""
    executable = folder / "vllm"
    executable.write_text(f"#!/bin/sh\nfor last; do :; done\n{script}\n")
    executable.chmod(0o755)
    return folder / "python"


def test_a_clients_result_file_becomes_a_run(tmp_path: Path) -> None:
    """At the requested rate; cached tokens, which it does not report, are unknown."""
    python = installed(tmp_path, f"echo '{json.dumps(SAVED)}' > \"$last\"")
    run = run_client(CLIENTS["vllm"], JOB, python)
    assert (run.name, run.rate_per_s, run.planned, len(run.requests)) == ("vllm", 4.0, 2, 2)
    assert run.wall_s == 2.5
    assert not run.cached_known


def test_with_a_trace_the_rate_is_that_of_the_trace(tmp_path: Path) -> None:
    """Two requests within two seconds."""
    python = installed(tmp_path, f"echo '{json.dumps(SAVED)}' > \"$last\"")
    assert run_client(CLIENTS["vllm"], replace(JOB, trace=tmp_path / "trace.jsonl"), python).rate_per_s == 1.0


def test_clients_run_offline(tmp_path: Path) -> None:
    """The client must not download a tokenizer."""
    python = installed(tmp_path, f'[ "$HF_HUB_OFFLINE" = 1 ] && echo \'{json.dumps(SAVED)}\' > "$last"')
    assert run_client(CLIENTS["vllm"], JOB, python).requests


@pytest.mark.parametrize("script", ["echo no such flag >&2; exit 2", "echo no such flag"])
def test_a_client_that_fails_or_writes_no_file_shows_its_output(tmp_path: Path, script: str) -> None:
    """Also with exit code 0."""
    with pytest.raises(ClientError, match="no such flag"):
        run_client(CLIENTS["vllm"], JOB, installed(tmp_path, script))


def test_the_error_for_a_missing_client_says_how_to_install_it(tmp_path: Path) -> None:
    """In its own environment, because it needs a gigabyte."""
    with pytest.raises(ClientError, match="pip install aiperf"):
        find_executable(CLIENTS["aiperf"], tmp_path / "python")
