"""Decides whether a request may come in.

`api/protocol.py` calls the gate once for each request to /v1 or to a pod, when its headers are complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from router.errors import RouterError


@dataclass(frozen=True, slots=True)
class Admission:
    """The decision. `refusal` is the error to answer with."""

    refusal: RouterError | None = None


ADMITTED = Admission()


class AdmissionGate:
    """Admits every request."""

    def check(self, path: str, headers: Mapping[bytes, bytes], peer: str) -> Admission:
        """The decision about one request. `headers` has the first value of each name, in lower case; `peer` is the
        client's address."""
        return ADMITTED
