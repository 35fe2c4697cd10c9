"""How late does the loop of a running router come, and what holds it for how much CPU time?

    python loadtest/watched.py LOOKS serve --config warmroute.yaml     # `warmroute serve`; its looks, written down
    python loadtest/watched.py LOOKS holds serve --config ...          # what holds the loop, too
    python loadtest/watched.py LOOKS idle                              # the looks of a loop with nothing to do

Each look of `router/observe/loop_lag.py` becomes a line of JSON in `LOOKS.PID`. With `holds` the router runs on
asyncio's own loop instead of uvloop, where each callback passes through Python and its CPU time can be told, which
nothing else on the machine changes. This file never judges what it sees.
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

sys.path.insert(0, str(Path(__file__).parents[1]))

from router.cli import main as warmroute
from router.observe import loop_lag
from router.observe.loop_lag import LoopLag

HOLD_S = 0.002
"""What holds the loop for less CPU time is not written down."""
SAMPLE_S = 0.002
"""Of CPU time, between two looks at where the process is."""
FRAMES = 5


class Look(msgspec.Struct, frozen=True, gc=False, tag="look"):
    """One look, by a clock that all processes share; `cpu_s` is what all threads computed since the look before: each
    of them may keep the loop from Python."""

    at_s: float
    late_s: float
    cpu_s: float

    @property
    def own_s(self) -> float:
        """By how much it was late while the process computed: all that can be blamed on it."""
        return min(self.late_s, self.cpu_s)


class Hold(msgspec.Struct, frozen=True, gc=False, tag="hold"):
    """One callback of the loop: CPU time of the loop's thread, and where that was now and then."""

    at_s: float
    cpu_s: float
    at: tuple[str, ...]


class Watch:
    """Writes to `out`."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._at: list[str] = []
        self._cpu_s = self._search_s = 0.0

    def looks(self) -> None:
        """From now on, write each down; there are as many when nobody is served."""
        loop_lag.IDLE_LOOK_S = loop_lag.LOOK_S
        look = LoopLag._look

        def watched(self_: LoopLag, late_s: float) -> None:
            cpu_s = time.process_time()
            self._write(Look(time.monotonic(), late_s, cpu_s - self._cpu_s))
            self._cpu_s = cpu_s
            look(self_, late_s)

        LoopLag._look = watched  # type: ignore[method-assign, assignment]

    def holds(self) -> None:
        """From now on, write long ones down."""
        uvicorn.config.LOOP_FACTORIES["uvloop"] = uvicorn.config.LOOP_FACTORIES["asyncio"]
        run = asyncio.Handle._run

        def watched(handle: Any) -> None:
            self._at.clear()
            began_s = time.thread_time()
            run(handle)
            cpu_s = time.thread_time() - began_s
            if cpu_s > HOLD_S:
                self._write(Hold(time.monotonic(), cpu_s, tuple(self._at) or (_name(handle._callback),)))

        asyncio.Handle._run = watched  # type: ignore[method-assign, assignment]
        gc.callbacks.append(self._search)
        signal.signal(signal.SIGPROF, lambda _number, frame: self._at.append(_place(frame)))
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)

    def _search(self, phase: str, about: dict[str, int]) -> None:
        """Of the garbage collector."""
        if phase == "start":
            self._search_s = time.thread_time()
        elif (cpu_s := time.thread_time() - self._search_s) > HOLD_S / 2:
            self._at.append(f"gc of generation {about['generation']}: {cpu_s * 1000:.1f} ms")

    def _write(self, line: Look | Hold) -> None:
        self._out.write(msgspec.json.encode(line) + b"\n")


def _name(callback: Any) -> str:
    owner = getattr(callback, "__self__", None)
    return owner.get_name() if isinstance(owner, asyncio.Task) else repr(callback)


def _place(frame: FrameType | None) -> str:
    """From the innermost outwards."""

    def places(frame: FrameType | None) -> Iterator[str]:
        while frame is not None:
            code = frame.f_code
            if code.co_filename != __file__:
                yield f"{Path(code.co_filename).stem}.{code.co_name}"
            frame = frame.f_back

    return " < ".join(list(places(frame))[:FRAMES])


def main() -> None:
    """Watch, and be what was asked for."""
    path = sys.argv.pop(1)
    with Path(f"{path}.{os.getpid()}").open("wb", buffering=1 << 12) as out:
        watch = Watch(out)
        watch.looks()
        if sys.argv[1] == "holds":
            del sys.argv[1]
            watch.holds()
        if sys.argv[1] == "idle":
            uvloop.run(LoopLag(lambda _late_s: None, lambda: False).run())
        else:
            warmroute()


if __name__ == "__main__":
    main()
