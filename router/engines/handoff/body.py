"""Edits top-level fields of a JSON body; every other value stays byte for byte and in its place.

Long integers, odd floats and inner whitespace are kept. Of a duplicate key the last value counts, as for every engine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from router.errors import MalformedRequest

STEERING_FIELDS = frozenset(
    {
        "kv_transfer_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
        "disaggregated_params",
    }
)
"""Fields that select whose KV an engine reads. Only a dialect writes them; a client's own never reach a pod."""

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_EMPTY: Mapping[str, Any] = {}


def edited(
    body: bytes,
    put: Mapping[str, Any] = _EMPTY,
    drop: Collection[str] = (),
    amend: Mapping[str, Any] = _EMPTY,
) -> bytes:
    """`body` without `STEERING_FIELDS` and `drop`, with every field of `put`, and with those fields of `amend` that it
    already has. A field keeps its place; new ones go to the end. The same bytes where nothing changes.

    Raises `MalformedRequest` where the body is not a JSON object.
    """
    try:
        fields = _OBJECT.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedRequest(f"The body is not a valid JSON object: {error}") from error
    kept = {name: value for name, value in fields.items() if name not in STEERING_FIELDS and name not in drop}
    changes = {**put, **{name: value for name, value in amend.items() if name in kept}}
    if not changes and len(kept) == len(fields):
        return body
    return msgspec.json.encode({**kept, **changes})
