"""How is each established load generator called, and what does the file that it leaves say?

Pure but for the files of the working folder: an `Ask` in, arguments out; the file's bytes in, rows out. Where a client
says when a request was due, times count from then. This file never starts one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from loadtest.record import Row

_REVISION = "0" * 40
_CACHED_TOKENIZER = "local/tokenizer"


class ClientError(Exception):
    """It is not installed, or it failed; the message says what to do or what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a client is asked to do. `tokenizer` is a folder with tokenizer.json; with a trace, its arrivals and lengths
    replace rate and tokens."""

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
    """How one is called in a working folder, and how the file that it leaves there becomes rows."""

    executable: str
    install: str
    arguments: Callable[[Ask, Path], list[str]]
    leaves: str
    rows: Callable[[bytes], list[Row]]
    knows_cached: bool


# --- aiperf -------------------------------------------------------------------------------------------------


def _aiperf_arguments(ask: Ask, folder: Path) -> list[str]:
    if ask.trace is None:
        raise ClientError("aiperf plays a trace: name one in Mooncake's format with --trace")
    some = folder / "trace.jsonl"
    with ask.trace.open() as lines:
        some.write_text("".join(islice(lines, ask.requests)))
    cache_tokenizer(ask.tokenizer, folder)
    return [
        *("profile", "--model", ask.model, "--url", ask.url, "--endpoint-type", "chat", "--streaming"),
        *("--input-file", str(some), "--custom-dataset-type", "mooncake_trace", "--fixed-schedule"),
        *("--synthesis-speedup-ratio", f"{ask.speedup:g}", "--synthesis-max-osl", str(ask.output_tokens)),
        *("--tokenizer", _CACHED_TOKENIZER, "--artifact-dir", str(folder), "--export-level", "records"),
        *("--ui", "none", "--no-gpu-telemetry", "--no-server-metrics"),
    ]


def cache_tokenizer(tokenizer: Path, folder: Path) -> None:
    """Put a tokenizer's files where huggingface_hub looks for downloaded ones: aiperf's worker processes set
    HF_HUB_OFFLINE and then take no path."""
    place = folder / f"models--{_CACHED_TOKENIZER.replace('/', '--')}"
    files = place / "snapshots" / _REVISION
    files.mkdir(parents=True)
    for path in tokenizer.glob("*.json"):
        shutil.copy(path, files)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(_REVISION)


def aiperf_rows(exported: bytes) -> list[Row]:
    """profile_export.jsonl: a request was due when its credit was issued."""
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


# --- vllm bench serve ---------------------------------------------------------------------------------------


def _vllm_arguments(ask: Ask, folder: Path) -> list[str]:
    return [
        *("bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
        *("--base-url", ask.url, "--model", ask.model, "--tokenizer", str(ask.tokenizer)),
        *("--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", str(ask.prefix_tokens)),
        *("--prefix-repetition-suffix-len", str(ask.prompt_tokens - ask.prefix_tokens)),
        *("--prefix-repetition-num-prefixes", str(ask.prefixes)),
        *("--prefix-repetition-output-len", str(ask.output_tokens)),
        *("--num-prompts", str(ask.requests), "--request-rate", f"{ask.rate_per_s:g}"),
        *("--save-result", "--save-detailed", "--result-filename", str(folder / "vllm.json")),
    ]


def vllm_rows(saved: bytes) -> list[Row]:
    """What --save-detailed adds: lists in the order of the requests, in seconds. Cached tokens are not among them."""
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


# --- guidellm -----------------------------------------------------------------------------------------------


def _guidellm_arguments(ask: Ask, folder: Path) -> list[str]:
    return [
        *("run", "--backend", f"kind=openai_http,target={ask.url},model={ask.model},validate_backend=false"),
        *("--profile", f"kind=poisson,rate={ask.rate_per_s:g}"),
        *("--constraint", f"kind=max_requests,count={ask.requests}"),
        *("--tokenizer", f"kind=hf_auto,model={ask.tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={ask.prompt_tokens},output_tokens={ask.output_tokens}"),
        *("--output", f"kind=json,path={folder / 'guidellm.json'}"),
    ]


def guidellm_rows(saved: bytes) -> list[Row]:
    """Its first benchmark, in seconds; the dispatch delay is its lateness. What it broke off itself is left out."""
    found = msgspec.json.decode(saved)["benchmarks"][0]["requests"]
    both = [(one, "") for one in found["successful"]] + [
        (one, "guidellm counts it as errored") for one in found["errored"]
    ]
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
    """None of them says which pod answered; a failed request has no counts."""
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
