"""Starts and stops real engines.

vLLM for CPU and llama.cpp as installed by `install.sh`, each in its own process group, so that its workers stop with
it. Blocking; for tests and tools. Logs are under the live home.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

HOME = Path(os.environ.get("WARMROUTE_LIVE_HOME", Path.home() / ".cache" / "warmroute" / "live"))
VISION_WEIGHTS = Path("tiny-qwen2-vl")
BLOCK_TOKENS = 32
"""The smallest block size of vLLM's CPU attention."""
REPLAY_PORT_OFFSET = 1000
START_TIMEOUT_S = 480.0
STOP_TIMEOUT_S = 20.0
LOG_TAIL_LINES = 40
RUST_DATE = "2026-11-28"
"""The date in prompts of gpt-oss."""


class EngineFailed(Exception):
    """The engine ended, or was not healthy in time."""


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A running engine. `stop` or `kill` it, or use it as a context manager."""

    name: str
    url: str
    log: Path
    process: subprocess.Popen[bytes]
    kv_endpoint: str | None = None
    """Address of its KV events."""
    replay_endpoint: str | None = None

    @property
    def address(self) -> str:
        """Host and port: the router's name for the pod."""
        return self.url.removeprefix("http://")

    def stop(self) -> None:
        """Terminate the process group; kill what is left after STOP_TIMEOUT_S."""
        self._signal_group(signal.SIGTERM)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    def kill(self) -> None:
        """Kill server, engine core and workers at once, as a lost node would."""
        self._signal_group(signal.SIGKILL)
        self.process.wait(STOP_TIMEOUT_S)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass  # the whole group has ended


@contextmanager
def started_together(starts: Sequence[Callable[[], EngineProcess]]) -> Iterator[list[EngineProcess]]:
    """Engines started concurrently, each in a thread of its own. All are killed at the end, also those whose neighbour
    does not start."""
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(starts)) as threads:
            starting = [threads.submit(start) for start in starts]
        for one in starting:
            if not one.exception():
                stack.callback(one.result().kill)
        yield [one.result() for one in starting]


def start_vllm(
    name: str,
    port: int,
    model_dir: Path,
    *,
    kv_port: int,
    extra_args: Sequence[str] = (),
    served_name: str = "tiny",
    installed: str = "vllm",
    environment: Mapping[str, str] = {},
    folder: Path | None = None,
    block_tokens: int | None = BLOCK_TOKENS,
) -> EngineProcess:
    """A healthy vLLM that publishes KV events on `kv_port` and replays them on `kv_port + REPLAY_PORT_OFFSET`.

    Without `block_tokens`, it chooses its block size.

    `installed` is the Python environment under the live home; the engine runs in `folder`. Takes about half a
    minute and 2 GiB. Raises `EngineFailed` with the end of its log.
    """
    replay_port = kv_port + REPLAY_PORT_OFFSET
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{kv_port}",
        "replay_endpoint": f"tcp://*:{replay_port}",
        "topic": f"kv@{name}@{served_name}",
    }
    command = [
        *(str(HOME / installed / "bin/python"), "-m", "vllm.entrypoints.cli.main", "serve", str(model_dir)),
        *("--served-model-name", served_name),
        *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "8192", "--max-num-seqs", "16"),
        *(() if block_tokens is None else ("--block-size", str(block_tokens))),
        *("--enforce-eager", "--enable-prefix-caching"),
        *("--enable-prompt-tokens-details", "--num-gpu-blocks-override", "2048"),
        *("--kv-events-config", json.dumps(events), *extra_args),
    ]
    environment = {
        **environment,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }
    endpoints = f"tcp://127.0.0.1:{kv_port}", f"tcp://127.0.0.1:{replay_port}"
    return _start(name, port, command, environment, *endpoints, folder=folder)


def start_vision(name: str, port: int, *, kv_port: int, weights: Path = VISION_WEIGHTS) -> EngineProcess:
    """A healthy vLLM with a tiny vision model, as `start_vllm`. It names its weights by a relative path, which
    identifiers of pictures depend on."""
    return start_vllm(
        name,
        port,
        weights,
        kv_port=kv_port,
        extra_args=("--skip-mm-profiling", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        environment={"PYTHONPATH": str(HOME / "vision")},
        folder=HOME / "model",
    )


def start_renderer(
    name: str,
    port: int,
    model_dir: Path,
    extra_args: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    installed: str = "vllm",
) -> EngineProcess:
    """vLLM's render server: templates and tokens without a model, in half a minute and 1 GiB. Raises `EngineFailed`."""
    command = [
        *(str(HOME / installed / "bin/python"), "-m", "vllm.entrypoints.cli.main", "launch", "render", str(model_dir)),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "32768"),
        *extra_args,
    ]
    return _start(name, port, command, {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **(environment or {})})


def start_rust_renderer(name: str, port: int, model_dir: Path, flags: Sequence[str] = ()) -> EngineProcess:
    """The renderer of vLLM's front end in Rust, in seconds and 300 MiB. Raises `EngineFailed`."""
    binary, served = str(HOME / "rust" / "vllm-rs"), ("--served-model-name", "tiny")
    command = [binary, "render", str(model_dir), *served, "--port", str(port), *flags]
    return _start(f"render-rust-{name}", port, command, {"VLLM_SYSTEM_START_DATE": RUST_DATE})


def start_llamacpp(name: str, port: int, gguf: Path) -> EngineProcess:
    """A healthy llama.cpp server, in a second and under 200 MiB. Raises `EngineFailed` with the end of its log."""
    script = Path(__file__).with_name("xllama_serve.py")
    return _start(name, port, [str(HOME / "llama/bin/python"), str(script), str(gguf), str(port)], {})


def _start(
    name: str,
    port: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    kv_endpoint: str | None = None,
    replay_endpoint: str | None = None,
    folder: Path | None = None,
) -> EngineProcess:
    if _healthy(f"http://127.0.0.1:{port}"):
        # an engine left by an aborted run would have a cache that is not empty
        raise EngineFailed(f"{name}: another engine responds on port {port}")
    log = HOME / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
        )
    engine = EngineProcess(name, f"http://127.0.0.1:{port}", log, process, kv_endpoint, replay_endpoint)
    try:
        _await_health(engine)
    except BaseException:
        engine.kill()
        raise
    return engine


def _await_health(engine: EngineProcess) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not _healthy(engine.url):
        if engine.process.poll() is not None:
            raise EngineFailed(f"{engine.name} ended with {engine.process.returncode}\n{_tail(engine.log)}")
        if time.monotonic() > deadline_s:
            raise EngineFailed(f"{engine.name} is not healthy after {START_TIMEOUT_S:g} s\n{_tail(engine.log)}")
        time.sleep(0.25)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _tail(log: Path) -> str:
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-LOG_TAIL_LINES:])
