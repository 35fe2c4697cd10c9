"""One line for each request; a disk error stops the file, never a request."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from loadtest.simulator import traffic
from router.cli.receipt_files import lines_of, recorded
from router.errors import ConfigError
from router.observe.changes import Change
from router.observe.ended import Ended, RecordedDecision
from router.observe.receipts import (
    MAX_BUFFERED_BYTES,
    REPEAT_FLEET_AFTER_SCENES,
    Receipt,
    ReceiptLog,
    ReceiptWriter,
)
from router.policy.decide import decide
from router.policy.recording import FleetLine, record
from router.types import FleetSnapshot, PodLoad, PodState, Scene
from tests.kit.scenes import POLICIES, pod, prompt, ready, request, scene

BY = POLICIES["cost_aware"]


def never(_delay_s: float, _call: Callable[[], None]) -> None:
    """A timer that does not fire."""


ENDED = Ended(id="r", at_s=1.0, model="m", endpoint="chat", result="ok")


def kept(seen: Scene) -> RecordedDecision:
    return RecordedDecision.of(record(seen), decide(seen, BY), BY, 0.0)


def written(*made: RecordedDecision | None, scenes: bool = True) -> list[bytes]:
    lines: list[bytes] = []
    writer = ReceiptWriter(lines.append, scenes=scenes)
    for one in made:
        writer.write(structs.replace(ENDED, decision=one), prompt(300))
    return lines


def in_file(folder: Path, lines: list[bytes]) -> Path:
    path = folder / "receipts.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def loaded(fleet: FleetSnapshot, running: int) -> FleetSnapshot:
    """The same fleet with a newer load."""
    pods = tuple(replace(status, load=PodLoad(running)) for status in fleet.pods)
    return replace(fleet, version=fleet.version + 1, pods=pods)


def test_a_fleet_is_written_once_for_all_its_scenes(tmp_path: Path) -> None:
    """Also after a change of load; another fleet is another line: another state, fewer pods, another pod of the same
    name."""
    one = scene(*ready(pod("a"), pod("b")))
    later = structs.replace(one, fleet=loaded(one.fleet, 3))
    drained = scene(replace(one.fleet.pods[0], state=PodState.DRAINING), one.fleet.pods[1])
    fewer = scene(*ready(pod("a")))
    another = scene(*ready(pod("a", hardware="a100x8")))
    scenes = (one, later, drained, fewer, another)
    path = in_file(tmp_path, written(*map(kept, scenes)))
    kinds = [type(line) for line in lines_of(path)]
    assert kinds == [FleetLine, Receipt, Receipt, *(FleetLine, Receipt) * 3]
    found = [seen.scene() for _, seen in recorded(lines_of(path)) if seen]
    assert [seen.fleet.pods[0].state for seen in found] == [seen.fleet.pods[0].state for seen in scenes]
    assert [decide(seen, BY) for seen in found] == [decide(seen, BY) for seen in scenes]


def test_a_fleet_is_repeated_after_a_number_of_scenes() -> None:
    """For rotated files and trimmed streams."""
    made = kept(scene(*ready(pod("a"))))
    lines = written(*[made] * (REPEAT_FLEET_AFTER_SCENES + 1))
    assert sum(line.startswith(b'{"kind":"fleet"') for line in lines) == 2


def test_a_scene_without_its_fleet_is_marked(tmp_path: Path) -> None:
    """Its receipt is read, but it cannot be decided again."""
    _, line = written(kept(scene(*ready(pod("a")))))
    ((receipt, found),) = recorded(lines_of(in_file(tmp_path, [line])))
    assert receipt.id == "r" and found is None


def test_without_scenes_only_receipts_are_written() -> None:
    """Also for a request that was never decided."""
    (line,) = written(kept(scene(*ready(pod("a")))), scenes=False)
    assert b'"candidates":' in line and b'"scene":' not in line
    (line,) = written(None)
    assert msgspec.json.decode(line, type=Receipt).blocks


def test_a_prompt_is_written_only_where_configured() -> None:
    """Otherwise neither text nor tokens."""
    asked = request(prompt={"messages": [{"role": "user", "content": "harbour"}]})
    seen = scene(*ready(pod("a")), request=asked)
    made = RecordedDecision.of(record(seen), decide(seen, BY), BY, 0.0, asked.prompt)
    assert b"harbour" not in b"".join(written(kept(seen))) and b"harbour" in b"".join(written(made))


def test_changes_are_lines_that_a_simulation_skips(tmp_path: Path) -> None:
    lines: list[bytes] = []
    writer = ReceiptWriter(lines.append)
    writer.write_change(Change(1.5, "ejected", "pod-1", "connection refused"))
    assert lines == [
        b'{"kind":"change","at_s":1.5,"what":"ejected","subject":"pod-1","cause":"connection refused"}',
    ]
    writer.write(structs.replace(ENDED, decision=kept(scene(*ready(pod("a"))))), prompt(300))
    path = in_file(tmp_path, lines)
    assert [type(line) for line in lines_of(path)] == [Change, FleetLine, Receipt]
    assert traffic.read_receipts(path) == []


@pytest.mark.parametrize("bad", [b"{}", b"no json", b'{"kind":"receipt","at_s":"x"}'])
def test_an_invalid_line_is_reported(tmp_path: Path, bad: bytes) -> None:
    """With file and number."""
    path = in_file(tmp_path, [*written(kept(scene(*ready(pod("a"))))), bad])
    with pytest.raises(ConfigError, match=r"receipts\.jsonl:3: not a receipt"):
        list(lines_of(path))


def test_a_scene_with_another_fleets_loads_is_refused(tmp_path: Path) -> None:
    """It cannot be decided again."""
    fleet, line = written(kept(scene(*ready(pod("a"), pod("b")))))
    fewer = msgspec.json.decode(fleet)
    fewer["pods"].pop()
    path = in_file(tmp_path, [msgspec.json.encode(fewer), line])
    with pytest.raises(ConfigError, match="scene of r: loads do not match the fleet"):
        list(recorded(lines_of(path)))


def test_receipts_are_appended_and_private_to_their_owner(tmp_path: Path) -> None:
    """A restart appends to the same file."""
    file = tmp_path / "receipts.jsonl"
    for line in (b"one", b"two"):
        log = ReceiptLog(file, never)
        log.write(line)
        log.close()
    assert file.read_text() == "one\ntwo\n"
    assert file.stat().st_mode & 0o777 == 0o600


def test_lines_are_written_within_a_second_while_no_request_follows(tmp_path: Path) -> None:
    """One timer for all lines of that second; a new one for those after it."""
    file, timers = tmp_path / "receipts.jsonl", list[tuple[float, Callable[[], None]]]()
    log = ReceiptLog(file, lambda delay_s, call: timers.append((delay_s, call)))
    for number in (1, 2):
        log.write(b"one")
        log.write(b"two")
        assert len(timers) == number
        delay_s, fire = timers[-1]
        assert delay_s <= 1
        fire()
        assert file.read_text() == "one\ntwo\n" * number
    log.close()
    timers[-1][1]()


def rotated(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_full_file_is_renamed_and_the_oldest_is_dropped(tmp_path: Path) -> None:
    """The rest goes to a new file, private as well, which begins with the fleet."""
    file = tmp_path / "receipts.jsonl"
    timers: list[Callable[[], None]] = []
    log = ReceiptLog(file, lambda _delay_s, call: timers.append(call), max_bytes=5, kept=2)
    for number in range(4):
        log.write(b"line-%d" % number)
        timers[-1]()
    log.close()
    names = ("receipts.jsonl", "receipts.jsonl.1", "receipts.jsonl.2")
    assert rotated(tmp_path) == dict(zip(names, (b"", b"line-3\n", b"line-2\n"), strict=True))
    assert log.files == 4
    assert file.stat().st_mode & 0o777 == 0o600


def test_no_line_is_lost_where_two_routers_rotate_a_file(tmp_path: Path) -> None:
    """Each file is about as large as configured."""
    file = tmp_path / "receipts.jsonl"
    timers: list[Callable[[], None]] = []
    logs = [ReceiptLog(file, lambda _s, call: timers.append(call), max_bytes=64, kept=99) for _ in range(2)]
    for number in range(40):
        for log in logs:
            log.write(b"line-%02d" % number)
            timers.pop()()
    for log in logs:
        log.close()
    found = rotated(tmp_path)
    assert sorted(b"".join(found.values()).split()) == sorted([b"line-%02d" % number for number in range(40)] * 2)
    assert max(map(len, found.values())) <= 64 + 8
    assert len(found) == 40 * 2 * 8 // 72 + 1


def test_the_fleet_is_repeated_in_a_new_file() -> None:
    """A rotated file can be replayed alone."""
    made, lines = kept(scene(*ready(pod("a")))), list[bytes]()
    files = [0]
    writer = ReceiptWriter(lines.append, lambda: files[0])
    for files[0] in (0, 1, 1):
        writer.write(structs.replace(ENDED, decision=made), prompt(300))
    assert [line.startswith(b'{"kind":"fleet"') for line in lines] == [True, False, True, False, False]


def test_a_disk_error_stops_only_the_receipts(tmp_path: Path) -> None:
    """Neither write nor close raises. The file is a pipe whose reader is closed."""
    file = tmp_path / "receipts.jsonl"
    os.mkfifo(file)
    reader = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    log = ReceiptLog(file, never)
    os.close(reader)
    for _ in range(3):
        log.write(b"x")
    log.close()


def test_lines_are_counted_when_a_disk_error_has_stopped_the_receipts(tmp_path: Path) -> None:
    """Each line from then on."""
    file, lost = tmp_path / "folder" / "receipts.jsonl", list[None]()
    file.parent.mkdir()
    log = ReceiptLog(file, never, on_lost=lambda: lost.append(None))
    file.unlink()
    file.parent.rmdir()
    log.write(b"x" * (MAX_BUFFERED_BYTES + 1))
    for _ in range(3):
        log.write(b"x")
    assert len(lost) == 3


def test_lines_of_two_routers_do_not_mix(tmp_path: Path) -> None:
    """Also long lines, and with both buffers in use."""
    file = tmp_path / "receipts.jsonl"
    logs = [ReceiptLog(file, never) for _ in range(2)]
    for number in range(200):
        for log, letter in zip(logs, b"ab", strict=True):
            log.write(bytes([letter]) * (1 + 37 * number))
    for log in logs:
        log.close()
    lines = file.read_bytes().splitlines()
    assert sorted(map(len, lines)) == sorted([1 + 37 * number for number in range(200)] * 2)
    assert all(len(set(line)) == 1 for line in lines)


def test_a_file_that_must_be_complete_is_written_after_a_disk_error(tmp_path: Path) -> None:
    """Lines beyond the memory for them are counted. A line that was written in part is repeated."""
    file, due, lost = tmp_path / "folder" / "usage.jsonl", list[Callable[[], None]](), list[None]()
    file.parent.mkdir()
    log = ReceiptLog(file, lambda _, call: due.append(call), retried_bytes=20, on_lost=lambda: lost.append(None))
    file.unlink()
    file.parent.rmdir()
    for line in (b"first", b"second", b"third too long", b"4"):
        log.write(line)
    due.pop(0)()
    assert len(lost) == 1 and len(due) == 1
    file.parent.mkdir()
    due.pop(0)()
    assert file.read_bytes() == b"first\nsecond\n4\n"
    log._retry(bytearray(b"a\nbcd\ne\n"), 4, OSError())
    log.close()
    assert file.read_bytes().endswith(b"\nbcd\ne\n")
