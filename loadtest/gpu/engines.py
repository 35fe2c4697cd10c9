"""Starts and stops vLLM pods on one GPU, or on a CPU for a rehearsal.

Each pod runs in its own process group, so that its workers end with it, and publishes KV events. A pod that does not
start with vLLM's defaults is tried once more without compilation and CUDA graphs; `eager` says so.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BLOCK_TOKENS = {"gpu": 16, "cpu": 32}
STEP_TOKENS = 8192
MAX_NUM_SEQS = 128
MAX_MODEL_LEN = 40960
GRAPH_SIZES = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]
START_TIMEOUT_S = 240.0
LOG_TAIL_BYTES = 6000


class EngineFailed(Exception):
    """The pod ended, or was not healthy in time. Its text is the end of the log."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """How to start one pod. Ports: HTTP, then KV events at +1000, replays at +2000."""

    name: str
    model_dir: Path
    port: int
    kv_bytes: int
    device: str = "gpu"
    python: str = sys.executable
    cpu_tier_gib: int = 0
    """Size of a CPU tier for evicted blocks; 0 is none."""
    max_model_len: int = MAX_MODEL_LEN

    @property
    def kv_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port + 1000}"

    @property
    def replay_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port + 2000}"

    @property
    def block_tokens(self) -> int:
        return BLOCK_TOKENS[self.device]

    def command(self, *, eager: bool) -> list[str]:
        """The command line of `vllm serve`."""
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.port + 1000}",
            "replay_endpoint": f"tcp://*:{self.port + 2000}",
            "topic": f"kv@{self.name}@{self.model_dir.name}",
        }
        return [
            *(self.python, "-m", "vllm.entrypoints.cli.main", "serve", str(self.model_dir)),
            *("--served-model-name", self.model_dir.name, "--host", "127.0.0.1", "--port", str(self.port)),
            *("--load-format", "dummy", "--max-model-len", str(self.max_model_len)),
            *("--max-num-seqs", str(MAX_NUM_SEQS), "--max-num-batched-tokens", str(STEP_TOKENS)),
            *("--block-size", str(self.block_tokens), "--enable-prefix-caching", "--enable-prompt-tokens-details"),
            *("--kv-events-config", json.dumps(events)),
            *self._device_options(eager=eager),
        ]

    def _device_options(self, *, eager: bool) -> list[str]:
        if self.device == "cpu":
            return ["--enforce-eager", "--num-gpu-blocks-override", "2048"]
        # The size of the KV cache is given; the share of memory only has to be free at the start.
        memory = ["--gpu-memory-utilization", "0.15", "--kv-cache-memory-bytes", str(self.kv_bytes)]
        graphs = ["--enforce-eager"] if eager else ["--cudagraph-capture-sizes", *map(str, GRAPH_SIZES)]
        tier = ["--kv-offloading-size", str(self.cpu_tier_gib), "--kv-offloading-backend", "native"]
        return [*memory, *graphs, *(tier if self.cpu_tier_gib else [])]


ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@dataclass(slots=True)
class Engine:
    """A running pod. `start_s` is how long it took until it was healthy."""

    plan: EnginePlan
    process: subprocess.Popen[bytes]
    log: Path
    began_s: float
    eager: bool = False
    start_s: float = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.plan.port}"

    def stop(self) -> None:
        """End the process group at once."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended
        self.process.wait()


def start(plan: EnginePlan, folder: Path, *, eager: bool = False) -> Engine:
    """Start a pod without waiting for it."""
    log = folder / f"{plan.name}{'-eager' if eager else ''}.log"
    device = CPU_ENVIRONMENT if plan.device == "cpu" else {}
    environment = {**os.environ, **ENVIRONMENT, **device}
    if plan.device == "cpu":
        environment.pop("PYTHONPATH", None)
    with log.open("wb") as output:
        process = subprocess.Popen(
            plan.command(eager=eager),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Engine(plan, process, log, time.monotonic(), eager)


def await_healthy(engines: Sequence[Engine], folder: Path, deadline_s: float) -> list[Engine]:
    """Wait until all are healthy or have failed twice. Returns the healthy ones; raises `EngineFailed` if none is."""
    healthy: list[Engine] = []
    reasons: list[str] = []
    for engine in engines:
        try:
            healthy.append(_await_one(engine, folder, deadline_s))
        except EngineFailed as error:
            reasons.append(str(error))
            print(f"{engine.plan.name} did not start:\n{error}", flush=True)
    if not healthy:
        raise EngineFailed("\n".join(reasons))
    return healthy


def _await_one(engine: Engine, folder: Path, deadline_s: float) -> Engine:
    try:
        _until_healthy(engine, deadline_s)
    except EngineFailed as error:
        engine.stop()
        if engine.eager or time.monotonic() > deadline_s:
            raise
        print(f"{engine.plan.name}: again without compilation, after:\n{error}", flush=True)
        return _await_one(start(engine.plan, folder, eager=True), folder, deadline_s)
    return engine


def _until_healthy(engine: Engine, deadline_s: float) -> None:
    while not _is_healthy(engine.url):
        if engine.process.poll() is not None:
            raise EngineFailed(_tail(engine.log))
        if time.monotonic() > min(deadline_s, engine.began_s + START_TIMEOUT_S):
            raise EngineFailed(f"not healthy in time\n{_tail(engine.log)}")
        time.sleep(0.2)
    engine.start_s = time.monotonic() - engine.began_s


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _tail(log: Path) -> str:
    return log.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace")
