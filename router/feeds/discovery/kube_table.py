"""Keeps the pods of one Kubernetes namespace, from lists and watch events, and decides what to request next.

No I/O, no clock. A full list always wins. Between two lists, an event cannot bring back an object that was deleted, nor
an older version of an object, although servers repeat and reorder events; an event that was lost is corrected by the
next list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from router.feeds.discovery.kube_objects import EXPIRED, Bookmark, Changed, Deleted, KubePod, ObjectKey, WatchEvent
from router.fleet.retry_pause import retry_pause_s

QUICK_S = 2.0
"""A watch that ends earlier without an event may have been refused because of its version."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 3.0
"""Pauses after failures. The pods must be right again 5 s after the API server is back."""
REFUSED_PAUSE_S = 10.0
"""Pause where permissions or the resource are missing, which takes a person to change."""
MAX_RETRY_AFTER_S = 30.0
_REFUSED = (401, 403, 404)
_TOO_OLD = (EXPIRED, 400, 504)
"""Statuses that a resource version may cause: expired, not a version of this server, newer than the server's."""
FROM_CACHE = "0"
"""The version that any API server can list from its memory."""


class PodTable:
    """The pods by namespace and name."""

    def __init__(self) -> None:
        self.pods: dict[ObjectKey, KubePod] = {}
        self.version = ""
        """From which a watch continues."""
        self._versions: dict[ObjectKey, str] = {}
        self._deleted: set[str] = set()
        """Uids of pods that were deleted since the last list. Uids are never used again."""

    def replace(self, objects: Iterable[tuple[KubePod, str]], version: str) -> int:
        """Apply a full list. Returns the number of pods that were different."""
        listed = {found.key: (found, at) for found, at in objects}
        new = {key: found for key, (found, _) in listed.items()}
        different = len(self.pods.keys() ^ new.keys()) + sum(
            new[key] != found for key, found in self.pods.items() if key in new
        )
        self.pods = new
        self._versions = {key: at for key, (_, at) in listed.items()}
        self._deleted.clear()
        self.version = version
        return different

    def apply(self, event: WatchEvent) -> bool:
        """Apply an event. Returns whether a pod changed in something that the router uses."""
        if not _is_older(event.version, self.version):
            self.version = event.version
        if isinstance(event, Bookmark):
            return False
        if isinstance(event, Deleted):
            return self._delete(event)
        return self._put(event)

    def _delete(self, event: Deleted) -> bool:
        self._deleted.add(event.uid)
        known = self.pods.get(event.key)
        if known is None or known.uid != event.uid:
            return False
        del self.pods[event.key], self._versions[event.key]
        return True

    def _put(self, event: Changed) -> bool:
        found = event.pod
        known, version = self.pods.get(found.key), self._versions.get(found.key, "")
        if found.uid in self._deleted or _is_older(event.version, version):
            return False
        self.pods[found.key], self._versions[found.key] = found, event.version
        return found != known


def _is_older(version: str, than: str) -> bool:
    """Whether a resource version is older. Versions that are not numbers cannot be compared."""
    return version.isdecimal() and than.isdecimal() and int(version) < int(than)


class WatchPlan:
    """What to request next: a full list, or a watch. `jitter` returns a number between 0.5 and 1."""

    def __init__(self, resync_s: float, jitter: Callable[[], float]) -> None:
        self._resync_s = resync_s
        self._jitter = jitter
        self._list_at_s = 0.0
        self._failures = 0
        self._quick_ends = 0
        self.list_version: str | None = FROM_CACHE
        """The version that a list must have reached, empty for the latest; None where a watch can continue."""

    def needs_list(self, now_s: float, version: str) -> bool:
        """Whether the next request is a list; `version` is that of the table."""
        if self.list_version is None and now_s >= self._list_at_s:
            self.list_version = version
        return self.list_version is not None

    def listed(self, now_s: float) -> None:
        self.list_version = None
        self._list_at_s = now_s + self._resync_s

    def watch_ended(self, lasted_s: float, events: int) -> float:
        """The server ended a watch. Returns the pause before the next request, in seconds."""
        self._failures = 0
        if lasted_s >= QUICK_S:
            self._quick_ends = 0
            return 0.0
        self._quick_ends = 0 if events else self._quick_ends + 1
        if self._quick_ends > 1:
            self.list_version = ""
            self._quick_ends = 0
        return FIRST_PAUSE_S * self._jitter()

    def failed(self, status: int, retry_after_s: float = 0.0) -> float:
        """A request failed with a status, 0 for no response. Returns the pause, in seconds."""
        self._failures += 1
        if status in _TOO_OLD:
            if self.list_version is None:
                self._failures = 1  # the server is back, and needs a list
            self.list_version = ""
        growing_s = retry_pause_s(self._failures, FIRST_PAUSE_S, MAX_PAUSE_S)
        pause_s = REFUSED_PAUSE_S if status in _REFUSED else growing_s
        return max(pause_s * self._jitter(), min(retry_after_s, MAX_RETRY_AFTER_S))
