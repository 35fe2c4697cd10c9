"""What each request used, for bills and for quotas: one line when it ends, in any way.

Lines of a process are numbered without gaps, so that a reader knows each line by its id and notices missing ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import msgspec

from router.observe.ended import EndedRequest

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True, eq=False)
class UsageWriter:
    """Numbers the lines of this process, and passes them on as JSON. `process`: a name that no other ever has."""

    process: str
    sink: Callable[[bytes], None]
    close: Callable[[], None] = lambda: None
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def ended(self, ended: EndedRequest) -> None:
        if ended.used is not None:
            ended.used.id = f"{self.process}-{next(self._numbers)}"
            self.sink(_encode(ended.used))
