"""Keeps a table equal to the selected pods of a namespace: lists it, watches it, and lists it again where needed.

`WatchPlan` decides what comes next; this file only sends the requests. Watches are short, so that one that is silently
dead is replaced after a minute. Nothing else runs between two events: slow pods cannot delay a deletion.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import InitVar, dataclass, field

import msgspec
import structlog

from router.feeds.discovery.kube_api import KubeApi, Permission
from router.feeds.discovery.kube_objects import KubeApiError, KubePod, ReadPod, read_event, read_page
from router.feeds.discovery.kube_table import PodTable, WatchPlan
from router.feeds.discovery.source_status import SourceStatus
from router.feeds.supervise import in_turns, loop_time_s, raise_if_cancelled

WATCH_S = (50.0, 70.0)
"""Bounds of the length of a watch, of which each has another, so that routers do not reconnect together."""
LATE_S = 10.0
"""A watch that the server has not ended this long after it should is dead."""
PAGE = 100
"""Pods in a list: as many of 80 KB are decoded in 3 ms."""
MAX_PAGES = 500
NONE_FOUND = "compare the selector and the namespace with `kubectl get pods --show-labels`"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Collection:
    """The pods of one namespace that a selector selects."""

    namespace: str
    """`*` for all."""
    selector: str
    read: ReadPod

    @property
    def path(self) -> str:
        return "/api/v1/pods" if self.namespace == "*" else f"/api/v1/namespaces/{self.namespace}/pods"

    def refusal(self, error: KubeApiError, verb: str) -> str:
        """An error of the API server with what to do. `verb`: of the request, `list` or `watch`."""
        return Permission("", "pods", ("list", "watch"), self.namespace).refusal(self.path, error, verb)


@dataclass(slots=True, eq=False)
class KubeWatch:
    """Follows one collection. `on_change` is called after each change of `table`."""

    api: KubeApi
    collection: Collection
    status: SourceStatus
    resync_s: InitVar[float]
    on_change: Callable[[], None]
    _plan: WatchPlan = field(init=False)
    table: PodTable = field(default_factory=PodTable)
    listed: bool = False

    def __post_init__(self, resync_s: float) -> None:
        self._plan = WatchPlan(resync_s, lambda: random.uniform(0.5, 1))

    async def run(self) -> None:
        while True:
            try:
                if self._plan.needs_list(loop_time_s(), self.table.version):
                    await self._list(self._plan.list_version or "")
                pause_s = await self._watch()
            except KubeApiError as error:
                verb = "watch" if self._plan.list_version is None else "list"
                self.status.fail(self.collection.refusal(error, verb))
                pause_s = self._plan.failed(error.status, error.retry_after_s)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self.status.fail(f"{self.collection.path}: response is not what Kubernetes sends: {error!s:.200}")
                self._plan.list_version = ""
                pause_s = self._plan.failed(0)
            raise_if_cancelled()
            await asyncio.sleep(pause_s)

    async def _list(self, version: str) -> None:
        query = {"labelSelector": self.collection.selector, "limit": str(PAGE), "resourceVersion": version}
        pods: list[tuple[KubePod, str]] = []
        for _ in range(MAX_PAGES):
            page = read_page(await self.api.get(self.collection.path, query))
            pods += [self.collection.read(item) async for item in in_turns(page.items)]
            if not page.more:
                break
            query |= {"continue": page.more, "resourceVersion": ""}
        else:
            raise KubeApiError(0, f"list has more than {MAX_PAGES} pages")
        if not pods and (self.table.pods or not self.listed):
            collection = self.collection
            log.warning("no pods found", path=collection.path, selector=collection.selector, hint=NONE_FOUND)
        different = self.table.replace(pods, page.version)
        if self.listed and version:
            self.status.resync_differences += different
        if different or not self.listed:
            self.listed = True
            self.on_change()
        self._plan.listed(loop_time_s())
        self.status.read()  # the watch that follows may be refused

    async def _watch(self) -> float:
        """Returns the pause before the next request, in seconds."""
        began_s, seen = loop_time_s(), 0
        length_s = random.uniform(*WATCH_S)
        query = {
            "labelSelector": self.collection.selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": f"{length_s:.0f}",
            "resourceVersion": self.table.version,
        }
        stream = self.api.lines(self.collection.path, query, length_s + LATE_S)
        async with aclosing(stream):
            async for lines in stream:
                seen += len(lines)
                self._apply(lines)
                self.status.confirm()
        return self._plan.watch_ended(loop_time_s() - began_s, seen)

    def _apply(self, lines: Iterable[bytes]) -> None:
        """Apply events, and publish the result once."""
        changed = False
        try:
            for line in lines:
                if not line.strip():
                    continue
                changed = self.table.apply(read_event(line, self.collection.read)) or changed
        finally:
            if changed:
                self.on_change()
