"""SGLang's handoff: both pods get the same body at once and meet in a room of the prefill pod's bootstrap server.

The prefill request is not limited to one token: the engine does that by its role. Source: docs/handoff.md#sglang.
"""

from __future__ import annotations

from router.addresses import bracketed, url_host
from router.engines.handoff.bodies import edited
from router.engines.handoff.dialect import Dialect, Handoff, Order, Pair
from router.types import Endpoint

DEFAULT_PORT = 8998


class Bootstrap(Dialect):
    """SGLang in `--disaggregation-mode prefill` and `decode`."""

    order = Order.TOGETHER
    serves_alone = False
    answers_setting = "--disaggregation-decode-enable-offload-kvcache, with a HiCache storage that prefill pods share"

    def prefill_body(self, endpoint: Endpoint, body: bytes, pair: Pair) -> bytes:
        return self._in_room(body, pair)

    def decode_body(self, endpoint: Endpoint, body: bytes, pair: Pair, handoff: Handoff) -> bytes:
        return self._in_room(body, pair)

    def _in_room(self, body: bytes, pair: Pair) -> bytes:
        """The host has brackets if it is an IPv6 address: only some releases add them, and all accept them."""
        room = {
            "bootstrap_host": bracketed(url_host(pair.prefill.url)),
            "bootstrap_port": pair.prefill.handoff_port or DEFAULT_PORT,
            "bootstrap_room": pair.id,
        }
        return edited(body, room)
