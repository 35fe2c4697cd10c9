"""What do established load generators measure of the same router?

    python loadtest/clients.py aiperf --url http://127.0.0.1:8080 --python ~/aiperf/bin/python --trace trace.jsonl
    python loadtest/clients.py vllm --url http://127.0.0.1:8080 --python ~/vllm/bin/python
    python loadtest/clients.py guidellm --url http://127.0.0.1:8080 --python ~/guidellm/bin/python

Each is run as its own users run it, offline, from an environment that is there already; what it wrote becomes one of
our records, and `report.py` shows it beside ours. This file never sends a request itself and never installs anything.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from loadtest.against import first_model
from loadtest.foreign import CLIENTS, Ask, Client, ClientError
from loadtest.record import Row, Run, record_of
from loadtest.run import command, finish
from router.cli.child_processes import StageError
from router.cli.figures import Objective
from router.cli.mock_engine_command import TOKENIZER_PACKAGE
from router.report.plots import PlotsUnavailable

TAIL_LINES = 15


def measured(client: Client, ask: Ask, python: Path | None) -> Run:
    """Run it to its end. Raises `ClientError`."""
    executable = found_executable(client, python)
    with TemporaryDirectory(prefix="warmroute-client-") as name:
        folder = Path(name)
        arguments = [executable, *client.arguments(ask, folder)]
        offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": name}
        done = subprocess.run(arguments, env=os.environ | offline, capture_output=True, text=True, check=False)
        result = folder / client.leaves
        if done.returncode or not result.exists():
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-TAIL_LINES:])
            raise ClientError(f"{client.executable} ended with exit code {done.returncode}:\n{tail}")
        rows = client.rows(result.read_bytes())
    ends_s = max((row.due_s + row.e2e_ms / 1000 for row in rows), default=0.0)
    return Run(
        name=client.executable,
        rate_per_s=_rate(ask, rows),
        planned=len(rows),
        wall_s=ends_s,
        pods=[],
        ideal_cached_tokens=None,
        cached_known=client.knows_cached,
        requests=rows,
    )


def found_executable(client: Client, python: Path | None) -> str:
    """Beside that Python, or on the PATH. Raises `ClientError`."""
    found = shutil.which(client.executable, path=str(python.parent) if python else None)
    if found is None:
        where = f"beside {python}" if python else "on the PATH"
        raise ClientError(
            f"{client.executable} is not {where}. Give it an environment of its own:\n"
            f"  python3 -m venv ~/{client.executable} && ~/{client.executable}/bin/pip install {client.install}\n"
            f"and say --python ~/{client.executable}/bin/python"
        )
    return found


def _rate(ask: Ask, rows: Sequence[Row]) -> float:
    """As asked, or the mean of the trace."""
    if ask.trace is None:
        return ask.rate_per_s
    span_s = rows[-1].due_s if rows else 0.0
    return round(len(rows) / span_s, 2) if span_s else math.nan


def main(
    client: Annotated[str, typer.Argument(help=f"One of {', '.join(CLIENTS)}.")],
    url: Annotated[str, typer.Option(help="A router, or anything that speaks OpenAI.")],
    python: Annotated[Path | None, typer.Option(help="Of the environment it is installed in; else the PATH.")] = None,
    model: Annotated[str, typer.Option(help="Default: the first that --url names.")] = "",
    tokenizer: Annotated[Path | None, typer.Option(help="Folder of the model's; default: the mock engines'.")] = None,
    requests: Annotated[int, typer.Option(min=1)] = 100,
    rate: Annotated[float, typer.Option(min=0.01, help="Requests a second (not aiperf: the trace's).")] = 8.0,
    prompt_tokens: Annotated[int, typer.Option(min=2)] = 600,
    prefix_tokens: Annotated[int, typer.Option(min=1, help="Shared ones among them (vllm).")] = 512,
    prefixes: Annotated[int, typer.Option(min=1, help="How many different (vllm).")] = 5,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of each answer; with a trace, the most.")] = 32,
    trace: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Mooncake JSONL (aiperf).")] = None,
    speedup: Annotated[float, typer.Option(min=0.01, help="Of the trace.")] = 1.0,
    ttft_ms: Annotated[float, typer.Option(help="A good answer begins within.")] = 1000.0,
    out: Annotated[Path | None, typer.Option(help="Results as JSON, with a row for each request.")] = None,
    report: Annotated[Path | None, typer.Option(help="The same as a page with plots.")] = None,
) -> None:
    """Exit code 1 when a request failed."""
    try:
        if client not in CLIENTS:
            raise ClientError(f"no client {client!r}; there are {', '.join(CLIENTS)}")
        ask = Ask(
            url=url.rstrip("/"),
            model=model or asyncio.run(first_model(url)),
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
        run = measured(CLIENTS[client], ask, python)
        scenario = f"{client} on {trace.stem}" if trace else client
        about = f"As {client} measures it."
        settings = {"requests": requests, "url": url}
        record = record_of(scenario, about, command(), settings, Objective(ttft_ms=ttft_ms), [run])
        finish(record, out, report, Console())
    except (ClientError, StageError, PlotsUnavailable) as error:
        raise SystemExit(f"clients: {error}") from error
    raise SystemExit(1 if any(row.error for row in run.requests) else 0)


def _mock_tokenizer() -> Path:
    spec = find_spec(TOKENIZER_PACKAGE)
    if spec is None or spec.origin is None:
        raise ClientError("name the model's tokenizer folder with --tokenizer")
    return Path(spec.origin).parent


if __name__ == "__main__":
    typer.run(main)
