"""How do pods hand over that share a pool of KV?

MooncakeStoreConnector, LMCacheMPConnector, offloading to a shared file system, 3FS: the prefill pod saves, the decode
pod looks up, and what was not saved in time is computed again. Source: reference/protocols.md 3.5, 3.6. This file
never tells either pod of the other.
"""

from __future__ import annotations

from router.engines.handoff.dialect import Dialect, Pair
from router.engines.handoff.vllm_handoff import prefill_leg
from router.types import Endpoint


class SharedStore(Dialect):
    """Prefill with one token, then decode with the client's own body."""

    def prefill_body(self, endpoint: Endpoint, body: bytes, pair: Pair) -> bytes:
        return prefill_leg(endpoint, body)
