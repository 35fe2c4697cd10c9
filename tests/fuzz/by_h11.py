"""How h11, a parser that shares no code with the router's, reads requests."""

from __future__ import annotations

from typing import NamedTuple

import h11

MOST_BYTES = 1 << 20


class ReadRequest(NamedTuple):
    """One whole request. Headers have lower-case names and no surrounding spaces."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    """The headers of its head."""
    body: bytes


class Reading(NamedTuple):
    """The whole requests of a connection, and the bytes after them. `is_valid`: h11 refuses nothing."""

    requests: list[ReadRequest]
    rest: bytes
    is_valid: bool


def read_connection(data: bytes) -> Reading:
    """What h11 reads, as a server that refuses each request, and so also CONNECT."""
    server, found = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_BYTES), list[ReadRequest]()
    server.receive_data(data)
    try:
        while request := _next_request(server):
            found.append(request)
            server.send(h11.Response(status_code=400, headers=[("content-length", "0")]))
            server.send(h11.EndOfMessage())
            if server.our_state is not h11.DONE or server.their_state is not h11.DONE:
                break
            server.start_next_cycle()
    except h11.RemoteProtocolError:
        return Reading(found, b"", False)
    return Reading(found, server.trailing_data[0], True)


def _next_request(server: h11.Connection) -> ReadRequest | None:
    head, body = server.next_event(), b""
    if not isinstance(head, h11.Request):
        return None
    while isinstance(event := server.next_event(), h11.Data):
        body += event.data
    if not isinstance(event, h11.EndOfMessage):
        return None
    return ReadRequest(head.method, head.target, [(bytes(n), bytes(v)) for n, v in head.headers], body)
