"""Keeps a table equal to the selected pods of a Kubernetes namespace: lists it, watches it, and lists it again.

`PodTable` and `WatchPlan` have no I/O and no clock: what a full list and events mean, and what to request next. A full
list always wins. Between two lists, an event cannot bring back an object that was deleted, nor an older version of an
object, although servers repeat and reorder events; an event that was lost is corrected by the next list. Watches are
short, so that one that is silently dead is replaced after a minute. Nothing else runs between two events: slow pods
cannot delay a deletion.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from contextlib import aclosing

import msgspec
import structlog

from router.config.pod_schema import KubernetesPods
from router.feeds.discovery.kube_api import (
    EXPIRED,
    KubeApi,
    KubeApiError,
    KubePod,
    ObjectKey,
    Permission,
    ReadPod,
    WatchEvent,
    read_event,
    read_page,
)
from router.feeds.discovery.membership import SourceStatus
from router.feeds.supervise import in_turns, loop_time_s, raise_if_cancelled
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
WATCH_S = (50.0, 70.0)
"""Bounds of the length of a watch, of which each has another, so that routers do not reconnect together."""
LATE_S = 10.0
"""A watch that the server has not ended this long after it should is dead."""
PAGE = 100
"""Pods in a list: as many of 80 KB are decoded in 3 ms."""
MAX_PAGES = 500
NONE_FOUND = "compare the selector and the namespace with `kubectl get pods --show-labels`"

log = structlog.get_logger()


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
        found = event.pod
        if found is None:
            return False
        known, version = self.pods.get(found.key), self._versions.get(found.key, "")
        if event.is_deleted:
            self._deleted.add(found.uid)
            if known is None or known.uid != found.uid:
                return False
            del self.pods[found.key], self._versions[found.key]
            return True
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


class KubeWatch:
    """Follows the pods of `namespace` (`*` for all) that `entry` selects. `on_change` is called after each change of
    `table`."""

    def __init__(
        self,
        api: KubeApi,
        entry: KubernetesPods,
        namespace: str,
        read: ReadPod,
        status: SourceStatus,
        on_change: Callable[[], None],
    ) -> None:
        self._api = api
        self._selector = entry.selector
        self._path = "/api/v1/pods" if namespace == "*" else f"/api/v1/namespaces/{namespace}/pods"
        self._permission = Permission("", "pods", ("list", "watch"), namespace)
        self._read = read
        self._status = status
        self._on_change = on_change
        self._plan = WatchPlan(entry.resync_s, lambda: random.uniform(0.5, 1))
        self.table = PodTable()
        self.listed = False

    async def run(self) -> None:
        while True:
            try:
                if self._plan.needs_list(loop_time_s(), self.table.version):
                    await self._list(self._plan.list_version or "")
                pause_s = await self._watch()
            except KubeApiError as error:
                verb = "watch" if self._plan.list_version is None else "list"
                self._status.fail(self._permission.refusal(self._path, error, verb))
                pause_s = self._plan.failed(error.status, error.retry_after_s)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self._status.fail(f"{self._path}: response is not what Kubernetes sends: {error!s:.200}")
                self._plan.list_version = ""
                pause_s = self._plan.failed(0)
            raise_if_cancelled()
            await asyncio.sleep(pause_s)

    async def _list(self, version: str) -> None:
        query = {"labelSelector": self._selector, "limit": str(PAGE), "resourceVersion": version}
        pods: list[tuple[KubePod, str]] = []
        for _ in range(MAX_PAGES):
            page = read_page(await self._api.get(self._path, query))
            pods += [self._read(item) async for item in in_turns(page.items or [])]
            if not page.metadata.continue_:
                break
            query |= {"continue": page.metadata.continue_, "resourceVersion": ""}
        else:
            raise KubeApiError(0, f"list has more than {MAX_PAGES} pages")
        if not pods and (self.table.pods or not self.listed):
            log.warning("no pods found", path=self._path, selector=self._selector, hint=NONE_FOUND)
        different = self.table.replace(pods, page.metadata.resource_version)
        if self.listed and version:
            self._status.resync_differences += different
        if different or not self.listed:
            self.listed = True
            self._on_change()
        self._plan.listed(loop_time_s())
        self._status.read()  # the watch that follows may be refused

    async def _watch(self) -> float:
        """Returns the pause before the next request, in seconds."""
        began_s, seen = loop_time_s(), 0
        length_s = random.uniform(*WATCH_S)
        query = {
            "labelSelector": self._selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": f"{length_s:.0f}",
            "resourceVersion": self.table.version,
        }
        stream = self._api.lines(self._path, query, length_s + LATE_S)
        async with aclosing(stream):
            async for lines in stream:
                seen += len(lines)
                self._apply(lines)
                self._status.confirm()
        return self._plan.watch_ended(loop_time_s() - began_s, seen)

    def _apply(self, lines: Iterable[bytes]) -> None:
        """Apply events, and publish the result once."""
        changed = False
        try:
            for line in lines:
                if not line.strip():
                    continue
                changed = self.table.apply(read_event(line, self._read)) or changed
        finally:
            if changed:
                self._on_change()
