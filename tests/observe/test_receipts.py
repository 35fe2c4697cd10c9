"""One line a request, and nothing that a full disk could do to a request."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from router.observe.receipts import Receipt, ReceiptLog, receipt_blocks
from router.types import Generation, PromptPrefix


def prefix(block_size_tokens: int, blocks: int) -> PromptPrefix:
    generation = Generation(model="m", block_size_tokens=block_size_tokens)
    return PromptPrefix(generation, range(block_size_tokens * blocks + 3), list(range(100, 100 + blocks)))


@pytest.mark.parametrize(
    ("block_size_tokens", "blocks", "kept"),
    [(16, 17, (128, [107, 115])), (16, 7, (128, [])), (64, 3, (128, [101])), (512, 2, (512, [100, 101]))],
)
def test_every_so_many_hashes_stand_for_all_before_them(
    block_size_tokens: int, blocks: int, kept: tuple[int, list[int]]
) -> None:
    """A chain hash covers the prompt up to its end, so that none between them is needed."""
    assert receipt_blocks(prefix(block_size_tokens, blocks)) == kept


def test_receipts_are_appended_for_their_owner_alone(tmp_path: Path) -> None:
    """A restart goes on in the same file."""
    file = tmp_path / "receipts.jsonl"
    for at_s in (1.0, 2.0):
        log = ReceiptLog(str(file))
        log.write(Receipt(at_s=at_s, model="m", endpoint="chat", result="ok"))
        log.close()
    assert file.read_text().splitlines() == [
        '{"at_s":1.0,"model":"m","endpoint":"chat","result":"ok"}',
        '{"at_s":2.0,"model":"m","endpoint":"chat","result":"ok"}',
    ]
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_disk_that_refuses_ends_the_receipts_and_nothing_else(tmp_path: Path) -> None:
    """Neither a write nor the close raises; here the file is a pipe whose reader has left."""
    file = tmp_path / "receipts.jsonl"
    os.mkfifo(file)
    reader = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    log = ReceiptLog(str(file))
    os.close(reader)
    for _ in range(3):
        log.write(Receipt(at_s=1.0, model="m", endpoint="chat", result="ok"))
    log.close()
