"""Writes the salt of a request into its body, so that the engine keeps its prefixes apart from those of other tenants.

The field goes to the end: of a duplicate key, every engine takes the last.
"""

from __future__ import annotations

import msgspec

from router.errors import MalformedRequest

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SALT = "cache_salt"


def appended_salt(body: bytes, salt: str) -> bytes:
    """The body, which is a JSON object with a field and without a salt, with this one. `salt` needs no escape. The
    body is copied and not decoded."""
    end = memoryview(body)[: body.rindex(b"}")]
    return b"".join((end, b',"%b":"%b"}' % (_SALT.encode(), salt.encode())))


def replaced_salt(body: bytes, salt: str) -> bytes:
    """The body with this salt in place of its own. Raises `MalformedRequest` unless it is a JSON object."""
    try:
        fields = _OBJECT.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedRequest(f"The request body is not a valid JSON object: {error}") from error
    fields.pop(_SALT, None)
    return msgspec.json.encode({**fields, _SALT: salt})
