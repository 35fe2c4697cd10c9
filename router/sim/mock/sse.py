"""Encodes JSON, named SSE events and the types of errors, for all response formats."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec

from router.sim.mock.mock_requests import EngineError

_ERROR_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
}

encode = msgspec.json.Encoder().encode


def error_type(error: EngineError) -> str:
    """vLLM's class of the error where it has one, else the phrase of the status."""
    return _ERROR_TYPES.get(error.status, error.status.phrase)


def data_event(body: dict[str, Any]) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


def named_event(body: dict[str, Any]) -> bytes:
    """An SSE event with the `type` of its body as its name."""
    return f"event: {body['type']}\n".encode() + data_event(body)
