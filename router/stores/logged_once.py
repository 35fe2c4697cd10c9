"""Logs once what may be found again and again, such as what was read from Redis and not used."""

from __future__ import annotations

import structlog

from router.errors import shortened

MAX_LOGGED, MAX_LOGGED_CHARACTERS = 100, 500
"""Different lines that are logged, and the length of each fact."""

TOO_LARGE = "skipping what is too large"

log = structlog.get_logger()


class LoggedOnce(set[str]):
    def warn(self, event: str, **facts: str) -> None:
        short = {name: shortened(fact, MAX_LOGGED_CHARACTERS) for name, fact in facts.items()}
        line = f"{event} {short}"
        if line not in self and len(self) < MAX_LOGGED:
            self.add(line)
            log.warning(event, **short)
