"""What was asked of this router, when, and what came of it: one line of JSON a request.

For `warmroute simulate`, which plays it again under other policies and fleets. A receipt holds lengths and block
hashes, never a prompt or an answer: hashes say what prompts share, not what they say. A disk that refuses costs no
request.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import BinaryIO

import msgspec
import structlog

from router.types import PromptPrefix

RECEIPT_BLOCK_TOKENS = 128
"""Hashes are kept for every so many tokens: a chain hash covers all that stands before it."""
FLUSH_S = 1.0

log = structlog.get_logger()


class Receipt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. `at_s` is the time of day at which it came; `blocks` are chain hashes, one for every
    `block_size_tokens` of the prompt. What is unknown is left out."""

    at_s: float
    model: str
    endpoint: str
    result: str
    pod: str = ""
    prefill_pod: str = ""
    """Where another one than `pod` computed the prompt."""
    policy: str = ""
    prompt_tokens: int = 0
    output_tokens: int | None = None
    block_size_tokens: int = 0
    blocks: list[int] = []
    predicted_ms: float | None = None
    predicted_cached_tokens: int | None = None
    cached_tokens: int | None = None
    ttft_ms: float | None = None
    e2e_ms: float = 0.0


def receipt_blocks(prompt: PromptPrefix) -> tuple[int, list[int]]:
    """Block size and chain hashes of a receipt: every so many of the prompt's own."""
    stride = max(RECEIPT_BLOCK_TOKENS // prompt.block_size_tokens, 1)
    return stride * prompt.block_size_tokens, [int(block) for block in prompt.hashes[stride - 1 :: stride]]


class ReceiptLog:
    """Appends to one file, of which every process needs its own."""

    def __init__(self, path: str) -> None:
        self._encoder = msgspec.json.Encoder()
        self._file: BinaryIO | None = Path(path).open("ab", buffering=1 << 16)  # noqa: SIM115, for its life
        Path(path).chmod(0o600)
        self._flushed_s = 0.0

    def write(self, receipt: Receipt) -> None:
        """Buffered; on the disk within about a second of the next receipt."""
        if self._file is None:
            return
        try:
            self._file.write(self._encoder.encode(receipt) + b"\n")
            if time.monotonic() - self._flushed_s > FLUSH_S:
                self._file.flush()
                self._flushed_s = time.monotonic()
        except OSError as error:
            log.error("no more receipts are written", why=str(error))
            self.close()

    def close(self) -> None:
        """Everything is on the disk, if the disk took it."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                log.error("the last receipts are lost", why=str(error))
