"""A transport for parsers under test: open or closed, reading or paused; nothing is sent."""

from __future__ import annotations

import asyncio
from typing import Any


class Wire(asyncio.Transport):
    """The router's side of a connection."""

    def __init__(self) -> None:
        super().__init__()
        self.open = self.reads = True

    def write(self, data: Any) -> None:
        pass

    def close(self) -> None:
        self.open = False

    abort = close

    def is_closing(self) -> bool:
        return not self.open

    def is_reading(self) -> bool:
        return self.reads

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default
