"""The state of a discovery source, for the log and the metrics."""

from __future__ import annotations

import structlog

from router.feeds.supervise import loop_time_s

log = structlog.get_logger()


class SourceStatus:
    """Whether the pods of a source are up to date. Each new error, and its end, is logged."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.error = ""
        """Why the pods may be outdated; empty if they are not."""
        self.resync_differences = 0
        """Pods that a watch had lost and a full list has corrected."""
        self._confirmed_s: float | None = None

    def read(self) -> None:
        """The pods were up to date at this moment; an error may last."""
        self._confirmed_s = loop_time_s()

    def confirm(self) -> None:
        self.read()
        if self.error:
            log.info("pod source available again", source=self.source)
            self.error = ""

    def fail(self, error: str) -> None:
        """The pods cannot be read. Those that were read before stay in use."""
        if error != self.error:
            log.error("pod source unavailable; its last pods stay in use", source=self.source, error=error)
            self.error = error

    @property
    def age_s(self) -> float:
        """Time since the pods were last up to date; 0 if they were never read."""
        return 0.0 if self._confirmed_s is None else loop_time_s() - self._confirmed_s
