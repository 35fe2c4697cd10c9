"""Decides whether a request may come in.

`api/protocol.py` calls the gate once for each request to /v1 or to a pod, when its headers are complete.
"""

from __future__ import annotations

from collections.abc import Mapping

from router.errors import RouterError


class AdmissionGate:
    """Admits every request."""

    def refusal(self, path: str, headers: Mapping[bytes, bytes], peer: str) -> RouterError | None:
        """The error to answer with; None admits the request. `headers`: the first value of each lower-case name;
        `peer`: the client's address."""
        return None
