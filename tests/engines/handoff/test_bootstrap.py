"""SGLang, as in docs/handoff.md#sglang."""

from __future__ import annotations

from router.engines.handoff.bootstrap import Bootstrap
from router.engines.handoff.dialect import Handoff
from tests.engines.handoff.pairs import CHAT, chat, pair, read


def test_both_legs_get_the_clients_body_and_the_same_room() -> None:
    """With the client's own stream and length."""
    dialect = Bootstrap()
    leg = dialect.prefill_body(CHAT, chat(), pair())
    assert leg == dialect.decode_body(CHAT, chat(), pair(), Handoff())
    assert read(leg) == read(chat()) | {"bootstrap_host": "10.0.0.3", "bootstrap_port": 8998, "bootstrap_room": 77}


def test_a_room_has_63_bits_and_an_ipv6_host_its_brackets() -> None:
    """Old releases join host and port without adding brackets."""
    leg = read(Bootstrap().prefill_body(CHAT, chat(), pair("http://[fd00::3]:8000", port=9001)))
    assert (leg["bootstrap_host"], leg["bootstrap_port"]) == ("[fd00::3]", 9001)


def test_a_client_cannot_choose_a_room_or_rank() -> None:
    """A client's own fields are replaced or dropped."""
    planted = chat(bootstrap_room=1, bootstrap_host="evil", routed_dp_rank=3, disagg_prefill_dp_rank=2)
    assert read(Bootstrap().decode_body(CHAT, planted, pair(), Handoff())) == read(
        Bootstrap().decode_body(CHAT, chat(), pair(), Handoff())
    )
