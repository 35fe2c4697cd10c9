"""Does `make test` say the same each time? Thirty runs of one commit; hours.

    python -m tests.endurance [--quiet 15] [--busy 10] [--stopped 5]

Some runs are on a quiet machine, some with a loop on every core, and in some pytest's workers are stopped (SIGSTOP)
for up to 3 s at random. Each finished run is a line of `.endurance/COMMIT.jsonl`, with its output in a file next to it:
started again, it goes on with what is missing. Prints a table, and ends with 1 if a run failed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import msgspec

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".endurance"
WORKER = b"exec(eval(sys.stdin.readline()))"
"""In the command line of each worker of pytest-xdist."""
MOST_STOPPED_S, MOST_PAUSE_S = 3.0, 10.0
MOST_RUN_S = 3600.0
LOOP = "while True: pass"


class Run(msgspec.Struct, frozen=True):
    kind: str
    code: int
    seconds: float
    failed: list[str]


# --- what happens meanwhile ---


@contextmanager
def busy() -> Iterator[None]:
    """A loop on every core."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for one in loops:
            one.kill()
            one.wait()


@contextmanager
def stopping(session: int, rng: random.Random) -> Iterator[None]:
    """Stop a worker of this session for a while, again and again."""
    ended = threading.Event()

    def stop_some() -> None:
        while not ended.wait(rng.uniform(0.0, MOST_PAUSE_S)):
            if workers := workers_of(session):
                one = rng.choice(workers)
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGSTOP)
                    ended.wait(rng.uniform(0.0, MOST_STOPPED_S))
                    os.kill(one, signal.SIGCONT)

    thread = threading.Thread(target=stop_some)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def workers_of(session: int) -> list[int]:
    """Process ids of the workers of pytest in a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if WORKER in path.read_bytes() and os.getsid(int(path.parent.name)) == session:
                found.append(int(path.parent.name))
    return found


# --- runs ---


def run(kind: str, command: Sequence[str], log: Path, seed: int) -> Run:
    began_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        try:
            if kind == "busy":
                with busy():
                    code = process.wait(MOST_RUN_S)
            elif kind == "stopped":
                with stopping(process.pid, random.Random(seed)):
                    code = process.wait(MOST_RUN_S)
            else:
                code = process.wait(MOST_RUN_S)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = log.read_text(errors="replace").splitlines()
    failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return Run(kind, code, round(time.monotonic() - began_s, 1), failed)


def commit() -> str:
    """The commit that is checked out. Ends the program where files differ from it."""
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, check=True, capture_output=True).stdout.strip():
        sys.exit("commit first: all runs are of one commit")
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return found.stdout.strip()


def read(state: Path) -> list[Run]:
    lines = state.read_bytes().splitlines() if state.exists() else []
    return [msgspec.json.decode(line, type=Run) for line in lines]


def table(runs: Sequence[Run]) -> Iterator[str]:
    """A row for each kind, then each test that failed."""
    yield "| runs | number | failed | median | longest |"
    yield "|---|---|---|---|---|"
    for kind in dict.fromkeys(one.kind for one in runs):
        those = [one for one in runs if one.kind == kind]
        seconds = [one.seconds for one in those]
        yield (
            f"| {kind} | {len(those)} | {sum(one.code != 0 for one in those)} | "
            f"{median(seconds):.0f} s | {max(seconds):.0f} s |"
        )
    for name, number in Counter(name for one in runs for name in one.failed).most_common():
        yield f"{number} times {name}"


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.endurance", description=(__doc__ or "").splitlines()[0])
    for kind, number in (("quiet", 15), ("busy", 10), ("stopped", 5)):
        options.add_argument(f"--{kind}", type=int, default=number, help=f"runs of this kind (default: {number})")
    options.add_argument("command", nargs="*", default=["make", "test"])
    given = options.parse_args()
    name = commit()
    FOLDER.mkdir(exist_ok=True)
    state = FOLDER / f"{name}.jsonl"
    runs = read(state)
    for kind in ("quiet", "busy", "stopped"):
        while sum(one.kind == kind for one in runs) < getattr(given, kind):
            log = FOLDER / f"{name}-{len(runs)}.log"
            runs.append(run(kind, given.command, log, len(runs)))
            with state.open("ab") as file:
                file.write(msgspec.json.encode(runs[-1]) + b"\n")
            last = runs[-1]
            print(f"{len(runs):2} {kind:8} {last.seconds:6.0f} s  {'passed' if not last.code else log}", flush=True)
    print(*table(runs), sep="\n")
    return int(any(one.code for one in runs))


if __name__ == "__main__":
    sys.exit(main())
