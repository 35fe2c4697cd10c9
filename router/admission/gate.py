"""Decides whether a request may come in.

`api/protocol.py` calls the gate once for each request to /v1 or to a pod, when its headers are complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from router.errors import RouterError


@dataclass(frozen=True, slots=True)
class Admission:
    """The result of a check. `refusal` is the error to answer with; None admits the request."""

    refusal: RouterError | None = None


ADMITTED = Admission()


class AdmissionGate:
    """Admits every request."""

    def check(self, path: str, headers: Mapping[bytes, bytes], peer: str) -> Admission:
        """Check one request. `headers`: the first value of each lower-case name; `peer`: the client's address."""
        return ADMITTED
