"""An edge in front of any forwarder."""

from __future__ import annotations

from typing import Any, cast

from fastapi import FastAPI
from starlette.types import ASGIApp

from router.admission.gate import AdmissionGate
from router.config.schema import Edge, Limits
from router.frontends.held_requests import HeldRequests
from router.frontends.http.openai_edge import OpenAiEdge
from router.frontends.response_locator import ResponseLocator
from router.request.reading import RequestReader
from tests.kit.cores import CoreOfPods


def edge_of(
    core: CoreOfPods,
    forwarder: object,
    *,
    edge: Edge | None = None,
    limits: Limits | None = None,
    reader: RequestReader | None = None,
    own: ASGIApp | None = None,
    gate: AdmissionGate | None = None,
    held: HeldRequests | None = None,
) -> OpenAiEdge:
    """An edge that serves requests for the pods of `core` by `forwarder`."""
    edge, limits = edge or Edge(), limits or Limits()
    reader = reader or RequestReader(core.fleet, edge, limits.max_messages, frozenset())
    responses, endings = ResponseLocator(core.fleet, core.state.stored), core.core.endings
    return OpenAiEdge(
        own or FastAPI(openapi_url=None),
        gate or AdmissionGate(),
        cast(Any, forwarder),
        endings,
        reader,
        responses,
        edge,
        limits,
        held=held,
    )
