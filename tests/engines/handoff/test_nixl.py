"""NixlConnector, as reference/protocols.md 3.2 has it."""

from __future__ import annotations

import pytest

from router.engines.handoff.dialect import Handoff
from router.engines.handoff.nixl import Nixl
from tests.engines.handoff.pairs import CHAT, COMPLETIONS, answer, chat, completion, pair, read

NIXL = Nixl()
ASK = (
    '{"do_remote_decode":true,"do_remote_prefill":false,'
    '"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
TOLD = (
    '{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[4,5,6]],"remote_engine_id":"6f0c",'
    '"remote_request_id":"chatcmpl-req-77-9a1b2c3d","remote_host":"10.0.0.3","remote_port":5600,"tp_size":1,'
    '"dcp_size":1,"pp_size":1,"remote_num_tokens":48,"remote_blocks_expiry_time":1234.0e0,"transfer_mode":"pull",'
    '"of_a_later_release":[1.0, 12345678901234567890123]}'
)
ANSWER = (
    '{"id":"x","choices":[{"index":0,"finish_reason":"length"}],"prompt_token_ids":[7,8],'
    f'"usage":{{"prompt_tokens_details":{{"cached_tokens":16}}}},"kv_transfer_params":{TOLD}}}'
).encode()


def handoff() -> Handoff:
    found = NIXL.read_handoff(CHAT, ANSWER, pair())
    assert found is not None
    return found


def test_prefill_is_asked_to_keep_its_blocks() -> None:
    """And for the prompt's tokens."""
    assert (
        NIXL.prefill_body(COMPLETIONS, completion(), pair())
        == (
            '{"model":"m","prompt":"hi","max_tokens":1,"stream":false,"kv_transfer_params":'
            + ASK
            + ',"return_token_ids":true}'
        ).encode()
    )


def test_the_parameters_pass_to_decode_as_they_came() -> None:
    """To the byte, fields of later releases included; nothing else of the body changes."""
    body = NIXL.decode_body(COMPLETIONS, b'{"model":"m","prompt":"hi","seed":1.0}', pair(), handoff())
    assert body == b'{"model":"m","prompt":"hi","seed":1.0,"kv_transfer_params":' + TOLD.encode() + b"}"


def test_a_chat_carries_the_prompts_tokens_where_the_release_reads_them() -> None:
    """Inside the parameters; elsewhere they would be refused or ignored."""
    new = read(NIXL.decode_body(CHAT, chat(), pair(version="0.27.0"), handoff()))
    assert new["kv_transfer_params"]["prompt_token_ids"] == [7, 8]
    assert new["stream"] is True
    for version in ("0.26.2", ""):
        old = read(NIXL.decode_body(CHAT, chat(), pair(version=version), handoff()))
        assert "prompt_token_ids" not in old["kv_transfer_params"]
    plain = read(NIXL.decode_body(COMPLETIONS, completion(), pair(), handoff()))
    assert "prompt_token_ids" not in plain["kv_transfer_params"]


def test_cached_tokens_are_the_prefill_pods() -> None:
    """The only ones that saved anything."""
    assert (handoff().cached_tokens, handoff().prompt_token_ids) == (16, [7, 8])


@pytest.mark.parametrize(
    "said", [answer(), answer(kv_transfer_params=None), answer(kv_transfer_params={}), answer(kv_transfer_params=[1])]
)
def test_an_answer_without_parameters_hands_nothing_over(said: bytes) -> None:
    """Decode then computes the prompt itself."""
    assert NIXL.read_handoff(CHAT, said, pair()) is None


def test_decode_must_follow_well_within_the_lease() -> None:
    """30 s; afterwards the blocks may hold another prompt, and nobody would notice."""
    assert NIXL.hold_s <= 15.0
