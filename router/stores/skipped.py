"""Says once what was read from Redis and not used: the same may be read again and again."""

from __future__ import annotations

import structlog

from router.errors import shortened

MAX_LOGGED, MAX_LOGGED_CHARACTERS = 100, 500
"""Different lines that are logged, and the length of each fact."""

log = structlog.get_logger()


class Skipped:
    """Logs each line once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def warn(self, event: str, **facts: str) -> None:
        short = {name: shortened(fact, MAX_LOGGED_CHARACTERS) for name, fact in facts.items()}
        line = f"{event} {short}"
        if line not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(line)
            log.warning(event, **short)

    def too_large(self, what: str, where: str) -> None:
        self.warn("skipping what is too large", what=what, where=where)
