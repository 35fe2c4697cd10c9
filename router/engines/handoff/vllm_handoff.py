"""What do all of vLLM's connectors ask of the two legs?

The prefill leg computes one token and answers unstreamed, because only then does the answer carry parameters. Source:
reference/protocols.md 3.1. This file never names a connector.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from router.engines.handoff.body import edited
from router.types import Endpoint, Pod

_NOTHING: Mapping[str, Any] = {}
_VERSION = re.compile(r"v?(\d+)\.(\d+)")


def prefill_leg(
    endpoint: Endpoint, body: bytes, put: Mapping[str, Any] = _NOTHING, drop: Collection[str] = ()
) -> bytes:
    """The client's body for one token. Whatever decides the prompt stays; `min_tokens` above one would be refused."""
    return edited(
        body,
        {"max_tokens": 1, "stream": False, **put},
        drop=("stream_options", "min_tokens", "n", *drop),
        amend={"max_completion_tokens": 1} if endpoint is Endpoint.CHAT else _NOTHING,
    )


def takes_prompt_tokens(pod: Pod) -> bool:
    """Does it read `prompt_token_ids` among the `kv_transfer_params` of a chat? vLLM does since 0.27."""
    release = _VERSION.match(pod.version)
    return release is not None and (int(release[1]), int(release[2])) >= (0, 27)
