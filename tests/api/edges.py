"""An edge in front of any forwarder."""

from __future__ import annotations

from typing import Any, cast

from router.config.edge_schema import Edge
from router.config.schema import Limits
from router.frontends.http.openai_edge import OpenAiEdge
from router.frontends.response_locator import ResponseLocator
from router.request.reading import RequestReader
from tests.request.cores import CoreOfPods


def edge_of(
    core: CoreOfPods,
    forwarder: object,
    *,
    edge: Edge | None = None,
    limits: Limits | None = None,
    reader: RequestReader | None = None,
) -> OpenAiEdge:
    """An edge that serves requests for the pods of `core` by `forwarder`."""
    edge, limits = edge or Edge(), limits or Limits()
    reader = reader or RequestReader(core.fleet, edge, limits.max_messages, frozenset())
    responses, endings = ResponseLocator(core.fleet, core.state.stored), core.core.endings
    return OpenAiEdge(cast(Any, forwarder), endings, reader, responses, edge, limits)
