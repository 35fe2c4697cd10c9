"""The process that looks after workers; these are scripts that only come and go."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from router.config.schema import Listen
from router.errors import ConfigError
from router.workers.supervisor import WorkerSupervisor, bind_port

pytestmark = [pytest.mark.anyio]

COMES_AND_STAYS = """
import pathlib, sys
folder, _, number = sys.argv[-1].rpartition(":")
with (pathlib.Path(folder) / number).open("a") as came:
    print("came", file=came)
"""


def workers(folder: Path, then: str) -> WorkerSupervisor:
    """Two of them; each notes in a file of its number that it has come, and then does `then`."""
    return WorkerSupervisor([sys.executable, "-S", "-c", COMES_AND_STAYS + then], folder, 2)


def came(folder: Path) -> list[int]:
    """How many there were of each."""
    files = [folder / str(number) for number in range(2)]
    return [file.read_text().count("came") if file.exists() else 0 for file in files]


async def test_a_worker_that_dies_is_replaced_and_all_end_on_sigterm(tmp_path: Path) -> None:
    """The first of number 1 dies; nobody comes after the signal."""
    dies = "if number == '1' and open(came.name).read().count('came') == 1: sys.exit(1)\nsys.stdin.read()"
    running = asyncio.create_task(workers(tmp_path, dies).run())
    while came(tmp_path) != [1, 2]:
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0
    assert came(tmp_path) == [1, 2]


@pytest.mark.parametrize("code", [2, 3])
async def test_a_worker_that_cannot_serve_from_the_start_ends_them_all(tmp_path: Path, code: int) -> None:
    """With its code: what is wrong with it is wrong with all."""
    refuses = f"sys.exit({code}) if number == '1' else sys.stdin.read()"
    assert await workers(tmp_path, refuses).run() == code
    assert came(tmp_path)[1] == 1


async def test_on_sighup_every_worker_gets_a_word(tmp_path: Path) -> None:
    """And goes on."""
    hears = "sys.stdin.read(1); print('came', file=open(came.name, 'a'), flush=True); sys.stdin.read()"
    running = asyncio.create_task(workers(tmp_path, hears).run())
    while came(tmp_path) != [1, 1]:
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGHUP)
    while came(tmp_path) != [2, 2]:
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
    assert await running == 0


@pytest.mark.net
def test_a_port_that_somebody_has_is_refused() -> None:
    """Though workers of one router share theirs."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = Listen(port=taken.getsockname()[1])
        for exclusive in (True, False):
            with pytest.raises(ConfigError, match=str(listen.port)):
                bind_port(listen, exclusive=exclusive)
    with bind_port(Listen(port=0)) as one, bind_port(Listen(port=one.getsockname()[1])) as two:
        assert one.getsockname() == two.getsockname()
        one.listen()
        with pytest.raises(ConfigError):
            bind_port(Listen(port=one.getsockname()[1]), exclusive=True)
    with pytest.raises(ConfigError, match="nowhere"):
        bind_port(Listen(host="nowhere.invalid"))
