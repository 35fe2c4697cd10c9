"""llama.cpp, with sample answers."""

from __future__ import annotations

import json

import pytest

from router.engines.engine_catalog import ENGINES
from router.types import PodLoad
from tests.kit.scenes import make_pod

LLAMACPP = ENGINES["llamacpp"]
MODELS = json.dumps({"data": [{"id": "tiny", "meta": {"n_ctx": 4096, "n_ctx_train": 32768}}]}).encode()


def test_load_is_read_with_and_without_a_usage() -> None:
    """Current releases do not export it."""
    now = b"llamacpp:requests_processing 1\nllamacpp:requests_deferred 2\n"
    assert LLAMACPP.parse_load(now, None, 1.0) == PodLoad(1, 2, 0.0, 1.0)
    assert LLAMACPP.parse_load(now + b"llamacpp:kv_cache_usage_ratio 0.5\n", None, 1.0) == PodLoad(1, 2, 0.5, 1.0)


def test_every_slot_holds_one_context() -> None:
    """The context is the slot's; without /props, the model's."""
    props = json.dumps({"default_generation_settings": {"n_ctx": 2048}, "total_slots": 4}).encode()
    facts = LLAMACPP.describe({"/v1/models": MODELS, "/props": props}, make_pod(engine="llamacpp"))
    assert facts is not None
    assert (facts.max_model_len_tokens, facts.capacity_tokens) == (2048, 8192)
    facts = LLAMACPP.describe({"/v1/models": MODELS}, make_pod(engine="llamacpp"))
    assert facts is not None
    assert (facts.max_model_len_tokens, facts.capacity_tokens) == (4096, None)


@pytest.mark.parametrize(("n_ctx", "slots"), [(0, 4), (-1, 4), (2048, -4), (-5, -4)])
def test_invalid_sizes_are_unknown(n_ctx: int, slots: int) -> None:
    """A negative capacity is never reported."""
    props = json.dumps({"default_generation_settings": {"n_ctx": n_ctx}, "total_slots": slots}).encode()
    facts = LLAMACPP.describe({"/v1/models": MODELS, "/props": props}, make_pod(engine="llamacpp"))
    assert facts is not None
    assert (facts.max_model_len_tokens, facts.capacity_tokens) == (max(n_ctx, 0) or 4096, None)


def test_only_text_can_be_tokenized() -> None:
    """With special tokens by default."""
    body = {"content": "hi", "add_special": True, "parse_special": True}
    assert LLAMACPP.tokenize_body("m", {"prompt": "hi"}) == body
    declined = {"prompt": "hi", "add_special_tokens": False}
    assert LLAMACPP.tokenize_body("m", declined) == body | {"add_special": False}
    assert LLAMACPP.tokenize_body("m", {"messages": []}) is None
    assert LLAMACPP.tokenize_body("m", {"prompt": [1]}) is None
