"""Runs `warmroute` and records how late its event loop is and which callbacks are long.

    python -m loadtest.faults.loop_watch PATH serve --config warmroute.yaml     # lag samples of `warmroute serve`
    python -m loadtest.faults.loop_watch PATH callbacks serve --config ...      # also long callbacks
    python -m loadtest.faults.loop_watch PATH idle                              # lag samples of an idle loop

Writes JSON lines to `PATH.PID`: the samples of `router/observe/loop_lag.py`. With `callbacks` the router runs on
asyncio's own loop instead of uvloop, where the CPU time of each callback can be measured independently of the load on
the machine.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import msgspec
import uvicorn.config
import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))

from router.cli import main as warmroute
from router.observe import loop_lag
from router.observe.loop_lag import LoopLag

HOLD_S = 0.002
"""Shorter callbacks are not recorded."""
SAMPLE_S = 0.002
"""CPU time between two stack samples."""
FRAMES = 5


class LagSample(msgspec.Struct, frozen=True, gc=False, tag="look"):
    """One lag sample, with a clock common to all processes. Since the previous sample: `cpu_s` is the CPU time of all
    threads, each of which can block the loop, and `waited_s` the time in which the loop was ready to run and had no
    core."""

    at_s: float
    late_s: float
    cpu_s: float
    waited_s: float = 0.0

    @property
    def own_s(self) -> float:
        """The part of the lag during which the process used the CPU and the machine had a core for its loop: the most
        that it can have caused."""
        return min(max(0.0, self.late_s - self.waited_s), self.cpu_s)


class LongCallback(msgspec.Struct, frozen=True, gc=False, tag="hold"):
    """One long callback: CPU time of the loop's thread, and stack samples."""

    at_s: float
    cpu_s: float
    at: tuple[str, ...]


class Watch:
    """Records to `PATH.PID`; a forked worker has its own file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._at: list[str] = []
        self._cpu_s = self._waited_s = self._search_s = 0.0
        self._open()
        os.register_at_fork(after_in_child=self._open)

    def _open(self) -> None:
        self._out: BinaryIO = Path(f"{self._path}.{os.getpid()}").open("wb", buffering=1 << 12)  # noqa: SIM115

    def close(self) -> None:
        """Write the last records."""
        self._out.close()

    def looks(self) -> None:
        """Record every lag sample, with the same interval for an idle router."""
        loop_lag.IDLE_INTERVAL_S = loop_lag.INTERVAL_S
        look = LoopLag._sample

        def watched(self_: LoopLag, late_s: float) -> None:
            cpu_s, waited_s = time.process_time(), _waited_s()
            self._write(LagSample(time.monotonic(), late_s, cpu_s - self._cpu_s, waited_s - self._waited_s))
            self._cpu_s, self._waited_s = cpu_s, waited_s
            look(self_, late_s)

        LoopLag._sample = watched  # type: ignore[method-assign, assignment]

    def callbacks(self) -> None:
        """Record long callbacks."""
        uvicorn.config.LOOP_FACTORIES["uvloop"] = uvicorn.config.LOOP_FACTORIES["asyncio"]
        run = asyncio.Handle._run

        def watched(handle: Any) -> None:
            self._at.clear()
            began_s = time.thread_time()
            run(handle)
            cpu_s = time.thread_time() - began_s
            if cpu_s > HOLD_S:
                self._write(LongCallback(time.monotonic(), cpu_s, tuple(self._at) or (_name(handle._callback),)))

        asyncio.Handle._run = watched  # type: ignore[method-assign, assignment]
        gc.callbacks.append(self._search)
        signal.signal(signal.SIGPROF, lambda _number, frame: self._at.append(_place(frame)))
        self._start_timer()
        os.register_at_fork(after_in_child=self._start_timer)

    def _start_timer(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)  # not inherited by forked processes

    def _search(self, phase: str, about: dict[str, int]) -> None:
        """Record long garbage collections."""
        if phase == "start":
            self._search_s = time.thread_time()
        elif (cpu_s := time.thread_time() - self._search_s) > HOLD_S / 2:
            self._at.append(f"gc of generation {about['generation']}: {cpu_s * 1000:.1f} ms")

    def _write(self, line: LagSample | LongCallback) -> None:
        self._out.write(msgspec.json.encode(line) + b"\n")


def _waited_s() -> float:
    """Time in which this thread was ready to run and had no core. Source: the kernel's
    Documentation/scheduler/sched-stats."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def _name(callback: Any) -> str:
    owner = getattr(callback, "__self__", None)
    return owner.get_name() if isinstance(owner, asyncio.Task) else repr(callback)


def _place(frame: FrameType | None) -> str:
    """Innermost frame first."""

    def places(frame: FrameType | None) -> Iterator[str]:
        while frame is not None:
            code = frame.f_code
            if code.co_filename != __file__:
                yield f"{Path(code.co_filename).stem}.{code.co_name}"
            frame = frame.f_back

    return " < ".join(list(places(frame))[:FRAMES])


def main() -> None:
    """Install the recorder and run the command."""
    watch = Watch(sys.argv.pop(1))
    try:
        watch.looks()
        if sys.argv[1] == "callbacks":
            del sys.argv[1]
            watch.callbacks()
        if sys.argv[1] == "idle":
            uvloop.run(LoopLag(lambda _late_s: None, lambda: False).run())
        else:
            warmroute()
    finally:
        watch.close()


if __name__ == "__main__":
    main()
