"""CPU times in seconds of the reference machine, so that a bound means the same on every machine.

No input may hold the event loop for 5 ms there; where everything takes twice as long, for 10 ms. The speed of a machine
changes within a second: interpreted code takes up to twice as long while a neighbour uses the same core. So it is
measured right before and after what is timed, in the same thread.
"""

from __future__ import annotations

from time import thread_time

FIXED_WORK_S = 0.00029
"""The CPU time of the fixed work on the reference machine when it is quiet: 2 cores of an AMD EPYC, Python 3.11."""


def slowness() -> float:
    """How many times as long as on the reference machine interpreted code takes here and now; at least 1."""
    return max(1.0, min(_fixed_work_s() for _ in range(3)) / FIXED_WORK_S)


def _fixed_work_s() -> float:
    """The CPU time of work that makes no objects for the garbage collector to count."""
    began_s, found, total = thread_time(), dict[int, int](), 0
    for number in range(5000):
        found[number & 255] = total
        total += number
    return thread_time() - began_s


class Stopwatch:
    """Times several runs of the same code, each in a `with` block."""

    def __init__(self) -> None:
        self.runs_s: list[float] = []
        """Seconds of the reference machine."""

    def __enter__(self) -> None:
        self._slowness = slowness()
        self._began_s = thread_time()

    def __exit__(self, *_: object) -> None:
        taken_s = thread_time() - self._began_s
        self.runs_s.append(taken_s / min(self._slowness, slowness()))

    @property
    def least_s(self) -> float:
        """The fastest run: the others have met a pause of the garbage collector, or a change of the machine's speed."""
        return min(self.runs_s)
