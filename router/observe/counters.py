"""What is counted while requests are served, before they end."""

from __future__ import annotations

from router.types import PodId


class Counters:
    """Counts nothing. `metrics.py` makes metrics of the same events."""

    def requests_began(self, more: int) -> None:
        """Requests began, or ended."""

    def match_degraded(self, model: str) -> None:
        """The index was incomplete when a prompt was matched."""

    def tokens_compared(self, model: str, rule: str, *, are_equal: bool) -> None:
        """A pod's count of prompt tokens was compared, of a chat that a rule concerns."""

    def attempt_ended(self, pod: PodId, result: str) -> None:
        """A pod answered, or failed."""

    def retried(self, reason: str) -> None:
        """Another candidate is tried."""

    def retry_refused(self, reason: str) -> None:
        """No other candidate was tried, because the retry budget is used up."""

    def provider_refused(self, provider: str, reason: str) -> None:
        """A provider did not serve a request that no pod served."""

    def continued(self, method: str, cause: str, result: str) -> None:
        """A broken stream was continued, or not."""

    def token_gap(self, model: str, workload: str, gap_s: float) -> None:
        """The time between two pieces of a stream, of a sample of the streams."""

    def queued(self, more: int) -> None:
        """A request begins or ends to wait in front of the fleet."""

    def queue_left(self, model: str, waited_s: float) -> None:
        """A request has left its queue."""

    def place_refused(self, model: str, reason: str) -> None:
        """A request was refused because it would be late."""

    def queue_learnt(self, model: str, error_share: float, rest_ms: float) -> None:
        """The margins of a queue."""
