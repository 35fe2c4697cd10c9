"""Reads zone and rack of Kubernetes nodes from their labels, where permissions allow it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import quote

import msgspec
import structlog

from router.config.discovery_schema import KubernetesPods
from router.feeds.discovery.kube_api import KubeApi
from router.feeds.discovery.kube_facts import ZONE_LABEL, NodePlace
from router.feeds.discovery.kube_objects import KubeApiError, read_labels

RETRY_S = 30.0
UNKNOWN = NodePlace()
MAX_NODES = 10_000
_DENIED = (401, 403)

log = structlog.get_logger()


class NodePlaces:
    """The places of the nodes that were asked for. `on_change` is called when one becomes known."""

    def __init__(self, api: KubeApi, entry: KubernetesPods, on_change: Callable[[], None]) -> None:
        self._api = api
        self._entry = entry
        self._on_change = on_change
        self._places: dict[str, NodePlace] = {}
        self._wanted: dict[str, None] = {}
        self._asked = asyncio.Event()

    def place(self, node: str) -> NodePlace:
        """Where a node is; unknown until it has been read."""
        known = self._places.get(node)
        if known is None and node and self._entry.node_labels and len(self._wanted) < MAX_NODES:
            self._wanted[node] = None
            self._asked.set()
        return known or UNKNOWN

    async def run(self) -> None:
        """Read the nodes that are asked for until cancelled, or until permission is denied."""
        while self._entry.node_labels:
            await self._asked.wait()
            self._asked.clear()
            for node in list(self._wanted):
                try:
                    await self._read(node)
                except KubeApiError as error:
                    if error.status in _DENIED:
                        self._explain(error)
                        return
                    if error.status != 404:
                        self._asked.set()
                        await asyncio.sleep(RETRY_S)
                        break

    async def _read(self, node: str) -> None:
        try:
            labels = read_labels(await self._api.get(f"/api/v1/nodes/{quote(node, safe='')}", {}))
        except (msgspec.DecodeError, UnicodeDecodeError):
            labels = {}
        except KubeApiError as error:
            if error.status == 404:
                self._wanted.pop(node, None)
            raise
        self._places[node] = NodePlace(labels.get(ZONE_LABEL, ""), labels.get(self._entry.rack_label, ""))
        self._wanted.pop(node, None)
        self._on_change()

    def _explain(self, error: KubeApiError) -> None:
        log.info(
            "zones of nodes unknown",
            error=str(error),
            hint='a ClusterRole with resources: ["nodes"], verbs: ["get"] lets the router read them; '
            "node_labels: false ends this message",
        )
