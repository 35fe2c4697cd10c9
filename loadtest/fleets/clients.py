"""Runs established load generators against a router and converts their results to records.

    python -m loadtest.fleets.clients aiperf --url http://127.0.0.1:8080 --python ~/aiperf/bin/python --trace t.jsonl
    python -m loadtest.fleets.clients vllm --url http://127.0.0.1:8080 --python ~/vllm/bin/python
    python -m loadtest.fleets.clients guidellm --url http://127.0.0.1:8080 --python ~/guidellm/bin/python

Each runs offline from its own installed environment. Where a client reports when a request was due, times count from
then. `report.py` shows the record next to others.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from loadtest.commands.child_processes import ChildError
from loadtest.commands.mock_engine_command import TOKENIZER_PACKAGE
from loadtest.fleets.record import Objective, Record, Row, Run, record_of
from loadtest.fleets.runs import command, first_model, run_script
from loadtest.html_page import OutOption, ReportOption

TAIL_LINES = 15
_REVISION = "0" * 40
_CACHED_TOKENIZER = "local/tokenizer"


class ClientError(ChildError):
    """A client is not installed or failed. The message has its output or says what to install."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientJob:
    """Parameters of one client run. `tokenizer` is a folder with tokenizer.json. A trace replaces rate and token
    counts."""

    url: str
    model: str
    tokenizer: Path
    requests: int
    rate_per_s: float
    prompt_tokens: int
    prefix_tokens: int
    prefixes: int
    output_tokens: int
    trace: Path | None
    speedup: float


@dataclass(frozen=True, slots=True)
class Client:
    """Command line of a client, and the parser of its result file."""

    executable: str
    install: str
    arguments: Callable[[ClientJob, Path], list[str]]
    result_file: str
    rows: Callable[[bytes], list[Row]]
    reports_cached: bool


# --- aiperf ---


def _aiperf_arguments(job: ClientJob, folder: Path) -> list[str]:
    if job.trace is None:
        raise ClientError("aiperf needs a trace in Mooncake's format; set --trace")
    some = folder / "trace.jsonl"
    with job.trace.open() as lines:
        some.write_text("".join(islice(lines, job.requests)))
    cache_tokenizer(job.tokenizer, folder)
    return [
        *("profile", "--model", job.model, "--url", job.url, "--endpoint-type", "chat", "--streaming"),
        *("--input-file", str(some), "--custom-dataset-type", "mooncake_trace", "--fixed-schedule"),
        *("--synthesis-speedup-ratio", f"{job.speedup:g}", "--synthesis-max-osl", str(job.output_tokens)),
        *("--tokenizer", _CACHED_TOKENIZER, "--artifact-dir", str(folder), "--export-level", "records"),
        *("--ui", "none", "--no-gpu-telemetry", "--no-server-metrics"),
    ]


def cache_tokenizer(tokenizer: Path, folder: Path) -> None:
    """Place the tokenizer in the layout of huggingface_hub's cache: aiperf's workers set HF_HUB_OFFLINE and accept no
    path."""
    place = folder / f"models--{_CACHED_TOKENIZER.replace('/', '--')}"
    files = place / "snapshots" / _REVISION
    files.mkdir(parents=True)
    for path in tokenizer.glob("*.json"):
        shutil.copy(path, files)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(_REVISION)


def aiperf_rows(exported: bytes) -> list[Row]:
    """Rows of profile_export.jsonl. A request was due when its credit was issued."""
    records = sorted(
        map(msgspec.json.decode, exported.splitlines()), key=lambda one: one["metadata"]["credit_issued_ns"]
    )
    first_ns = records[0]["metadata"]["credit_issued_ns"] if records else 0
    return [_aiperf_row(one["metadata"], one["metrics"], one.get("error"), first_ns) for one in records]


def _aiperf_row(when: Mapping[str, Any], metrics: Mapping[str, Any], error: Any, first_ns: int) -> Row:
    def value(name: str) -> Any:
        return metrics.get(name, {}).get("value")

    due_ns, ttft_ms = when["credit_issued_ns"], value("time_to_first_token")
    late_ms = (when["request_start_ns"] - due_ns) / 1e6
    return _row(
        due_s=(due_ns - first_ns) / 1e9,
        late_ms=late_ms,
        ttft_ms=None if ttft_ms is None else ttft_ms + late_ms,
        e2e_ms=(when["request_end_ns"] - due_ns) / 1e6,
        prompt_tokens=value("usage_prompt_tokens"),
        cached_tokens=value("usage_prompt_cache_read_tokens"),
        output_tokens=value("usage_completion_tokens"),
        error=json.dumps(error) if error else "",
    )


# --- vllm bench serve ---


def _vllm_arguments(job: ClientJob, folder: Path) -> list[str]:
    return [
        *("bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
        *("--base-url", job.url, "--model", job.model, "--tokenizer", str(job.tokenizer)),
        *("--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", str(job.prefix_tokens)),
        *("--prefix-repetition-suffix-len", str(job.prompt_tokens - job.prefix_tokens)),
        *("--prefix-repetition-num-prefixes", str(job.prefixes)),
        *("--prefix-repetition-output-len", str(job.output_tokens)),
        *("--num-prompts", str(job.requests), "--request-rate", f"{job.rate_per_s:g}"),
        *("--save-result", "--save-detailed", "--result-filename", str(folder / "vllm.json")),
    ]


def vllm_rows(saved: bytes) -> list[Row]:
    """Rows of the --save-detailed lists, in seconds. They lack cached tokens."""
    found = msgspec.json.decode(saved)
    columns = ("start_times", "ttfts", "latencies", "input_lens", "output_lens", "errors")
    began_s = min(found["start_times"], default=0.0)
    rows = [
        _row(
            due_s=start_s - began_s,
            late_ms=0.0,
            ttft_ms=None if error else ttft_s * 1000,
            e2e_ms=latency_s * 1000,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            error=error,
        )
        for start_s, ttft_s, latency_s, prompt_tokens, output_tokens, error in zip(
            *(found[column] for column in columns), strict=True
        )
    ]
    return sorted(rows, key=lambda row: row.due_s)


# --- guidellm ---


def _guidellm_arguments(job: ClientJob, folder: Path) -> list[str]:
    return [
        *("run", "--backend", f"kind=openai_http,target={job.url},model={job.model},validate_backend=false"),
        *("--profile", f"kind=poisson,rate={job.rate_per_s:g}"),
        *("--constraint", f"kind=max_requests,count={job.requests}"),
        *("--tokenizer", f"kind=hf_auto,model={job.tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={job.prompt_tokens},output_tokens={job.output_tokens}"),
        *("--output", f"kind=json,path={folder / 'guidellm.json'}"),
    ]


def guidellm_rows(saved: bytes) -> list[Row]:
    """Rows of the first benchmark, in seconds. The dispatch delay is the lateness. Cancelled requests are skipped."""
    found = msgspec.json.decode(saved)["benchmarks"][0]["requests"]
    both = [(one, "") for one in found["successful"]] + [(one, "errored in guidellm") for one in found["errored"]]
    due_s = [one["request_start_time"] - one["request_dispatch_delay"] for one, _ in both]
    began_s = min(due_s, default=0.0)
    rows = [_guidellm_row(one, at_s - began_s, error) for (one, error), at_s in zip(both, due_s, strict=True)]
    return sorted(rows, key=lambda row: row.due_s)


def _guidellm_row(one: Mapping[str, Any], due_s: float, error: str) -> Row:
    late_ms, ttft_ms = one["request_dispatch_delay"] * 1000, one["time_to_first_token_ms"]
    return _row(
        due_s=due_s,
        late_ms=late_ms,
        ttft_ms=None if ttft_ms is None else ttft_ms + late_ms,
        e2e_ms=one["request_latency"] * 1000 + late_ms,
        prompt_tokens=one["prompt_tokens"],
        cached_tokens=one["cached_tokens"],
        output_tokens=one["output_tokens"],
        error=error,
    )


def _row(
    *,
    due_s: float,
    late_ms: float,
    ttft_ms: float | None,
    e2e_ms: float,
    prompt_tokens: int | None,
    output_tokens: int | None,
    error: str,
    cached_tokens: int | None = None,
) -> Row:
    """A row without a pod, which no client reports. A failed request has no counts."""
    return Row(
        kind="all",
        due_s=due_s,
        late_ms=late_ms,
        ttft_ms=ttft_ms,
        e2e_ms=e2e_ms,
        prompt_tokens=int(prompt_tokens or 0),
        cached_tokens=int(cached_tokens or 0),
        predicted_cached_tokens=None,
        output_tokens=int(output_tokens or 0),
        pod="",
        error=error,
    )


CLIENTS = {
    "aiperf": Client("aiperf", "aiperf", _aiperf_arguments, "profile_export.jsonl", aiperf_rows, True),
    "vllm": Client("vllm", "vllm", _vllm_arguments, "vllm.json", vllm_rows, False),
    "guidellm": Client("guidellm", "torch guidellm", _guidellm_arguments, "guidellm.json", guidellm_rows, True),
}


# --- running a client ---


def run_client(client: Client, job: ClientJob, python: Path | None) -> Run:
    """Run a client to its end. Raises `ClientError`."""
    executable = find_executable(client, python)
    with TemporaryDirectory(prefix="warmroute-client-") as name:
        folder = Path(name)
        arguments = [executable, *client.arguments(job, folder)]
        offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": name}
        done = subprocess.run(arguments, env=os.environ | offline, capture_output=True, text=True, check=False)
        result = folder / client.result_file
        if done.returncode or not result.exists():
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-TAIL_LINES:])
            raise ClientError(f"{client.executable} failed with exit code {done.returncode}:\n{tail}")
        rows = client.rows(result.read_bytes())
    ends_s = max((row.due_s + row.e2e_ms / 1000 for row in rows), default=0.0)
    return Run(
        name=client.executable,
        rate_per_s=_rate(job, rows),
        planned=len(rows),
        wall_s=ends_s,
        pods=[],
        ideal_cached_tokens=None,
        cached_known=client.reports_cached,
        requests=rows,
    )


def find_executable(client: Client, python: Path | None) -> str:
    """Path of the client's program: in the environment of `python`, or on the PATH. Raises `ClientError`."""
    found = shutil.which(client.executable, path=str(python.parent) if python else None)
    if found is None:
        where = f"next to {python}" if python else "on the PATH"
        raise ClientError(
            f"{client.executable} is not {where}. Install it in its own environment:\n"
            f"  python3 -m venv ~/{client.executable} && ~/{client.executable}/bin/pip install {client.install}\n"
            f"and set --python ~/{client.executable}/bin/python"
        )
    return found


def _rate(job: ClientJob, rows: Sequence[Row]) -> float:
    """The requested rate, or the mean rate of the trace."""
    if job.trace is None:
        return job.rate_per_s
    span_s = rows[-1].due_s if rows else 0.0
    return round(len(rows) / span_s, 2) if span_s else math.nan


def main(
    client: Annotated[str, typer.Argument(help=f"One of {', '.join(CLIENTS)}.")],
    url: Annotated[str, typer.Option(help="Base URL of a router or any OpenAI-compatible server.")],
    python: Annotated[
        Path | None, typer.Option(help="Python of the client's environment; default: search the PATH.")
    ] = None,
    model: Annotated[str, typer.Option(help="Default: the first model of --url.")] = "",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the model's tokenizer; default: the mock engines'.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1)] = 100,
    rate: Annotated[float, typer.Option(min=0.01, help="Requests per second (not aiperf: the trace's).")] = 8.0,
    prompt_tokens: Annotated[int, typer.Option(min=2)] = 600,
    prefix_tokens: Annotated[int, typer.Option(min=1, help="Of which shared (vllm).")] = 512,
    prefixes: Annotated[int, typer.Option(min=1, help="Number of different prefixes (vllm).")] = 5,
    output_tokens: Annotated[int, typer.Option(min=1, help="Per response; with a trace, the maximum.")] = 32,
    trace: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Mooncake JSONL (aiperf).")] = None,
    speedup: Annotated[float, typer.Option(min=0.01, help="Factor on the trace's arrival rate.")] = 1.0,
    ttft_ms: Annotated[float, typer.Option(help="TTFT objective.")] = 1000.0,
    out: OutOption = None,
    report: ReportOption = None,
) -> None:
    """Run one client. Exit code 1 if a request failed."""

    async def played(_console: Console) -> Record:
        if client not in CLIENTS:
            raise ClientError(f"unknown client {client!r}; known: {', '.join(CLIENTS)}")
        job = ClientJob(
            url=url.rstrip("/"),
            model=model or await first_model(url),
            tokenizer=tokenizer or _mock_tokenizer(),
            requests=requests,
            rate_per_s=rate,
            prompt_tokens=prompt_tokens,
            prefix_tokens=min(prefix_tokens, prompt_tokens - 1),
            prefixes=prefixes,
            output_tokens=output_tokens,
            trace=trace,
            speedup=speedup,
        )
        run = await asyncio.to_thread(run_client, CLIENTS[client], job, python)
        scenario, settings = f"{client} on {trace.stem}" if trace else client, {"requests": requests, "url": url}
        return record_of(scenario, f"Measured by {client}.", command(), settings, Objective(ttft_ms=ttft_ms), [run])

    run_script(played, out, report)


def _mock_tokenizer() -> Path:
    spec = find_spec(TOKENIZER_PACKAGE)
    if spec is None or spec.origin is None:
        raise ClientError("set --tokenizer to the folder of the model's tokenizer")
    return Path(spec.origin).parent


if __name__ == "__main__":
    typer.run(main)
