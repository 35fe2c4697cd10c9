"""Every error of ours has a status and an OpenAI shape."""

from __future__ import annotations

import json
from collections.abc import Iterator

from router.api.errors import SHAPES, error_body, shape_of
from router.errors import ConfigError, MalformedRequest, RouterError


def subclasses(root: type[RouterError]) -> Iterator[type[RouterError]]:
    for child in root.__subclasses__():
        yield child
        yield from subclasses(child)


def test_the_table_names_every_error_that_a_request_can_meet() -> None:
    """A wrong configuration is found before any request."""
    assert set(subclasses(RouterError)) - {ConfigError} == set(SHAPES)


def test_a_body_has_openais_four_fields() -> None:
    """With the field at fault named."""
    error = json.loads(error_body(MalformedRequest("no messages", param="messages")))["error"]
    assert error == {"message": "no messages", "type": "invalid_request_error", "param": "messages", "code": None}


def test_an_unexpected_error_tells_the_client_nothing() -> None:
    """Its text may hold anything."""
    error = ValueError("a secret")
    assert shape_of(error).status == 500
    assert b"secret" not in error_body(error)
