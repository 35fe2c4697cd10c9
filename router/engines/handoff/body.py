"""How does one field of a JSON body change while all others stay as they came?

Top-level fields are put and dropped; every other value stays byte for byte and in its place, whatever it holds: long
integers, odd floats, its own whitespace. Of a key that stands twice the last value holds, as for every engine. This
file never reads a value.
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
"""What tells an engine whose KV to take. A dialect alone writes these: a client's own reach no pod."""

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NOTHING: Mapping[str, Any] = {}


def edited(
    body: bytes,
    put: Mapping[str, Any] = _NOTHING,
    drop: Collection[str] = (),
    amend: Mapping[str, Any] = _NOTHING,
) -> bytes:
    """`body` without `STEERING_FIELDS` and `drop`, with every field of `put`, and with those of `amend` that it already
    has: in their old place, or else at the end. The very bytes where that changes nothing.

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
