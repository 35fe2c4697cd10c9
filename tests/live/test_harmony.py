"""The router gives bodies for gpt-oss the tokens that a real vLLM gives them."""

from __future__ import annotations

from collections import Counter
from functools import partial

import httpx
import pytest

from router.config.tokenizer_files import TokenizerSource, load_tokenizer
from router.engines.engine_catalog import ENGINES
from router.prompt.conversation import Unrenderable
from router.prompt.fingerprint import Fingerprinter
from router.prompt.harmony import Harmony
from router.types import Endpoint, Generation
from tests.kit import scenes
from tests.live.harmony_goldens import DATE, MODEL, renderer
from tests.live.message_bodies import Body
from tests.live.message_goldens import BODIES, each_body, rendered

pytestmark = [pytest.mark.live, pytest.mark.net]

TRIED = 1000
PORT = 18142


def test_every_body_has_the_engines_tokens() -> None:
    """By the model's own tokenizer; a text of a special token, and an empty message of the assistant, are not read."""
    tokenizer = load_tokenizer(TokenizerSource(str(MODEL)), fast=True)
    harmony = Harmony([token.content for token in tokenizer.added_tokens], lambda: DATE)
    fingerprinter = Fingerprinter(tokenizer, harmony, Generation(model="tiny"))
    results: Counter[tuple[Endpoint, str]] = Counter()

    def compare(endpoint: Endpoint, body: Body) -> None:
        request = scenes.request(endpoint=endpoint, model="tiny", body=b"", prompt=body)
        engine = rendered(client, endpoint, body)
        try:
            ours = list(fingerprinter.fingerprint(request, ENGINES["vllm"].conversions[endpoint]).tokens)
        except Unrenderable:
            ours = None
        results[endpoint, "unread" if ours is None else "refused" if engine is None else "equal"] += 1
        assert engine is None or ours is None or ours == engine, body

    with renderer(PORT) as engine, httpx.Client(base_url=engine.url, timeout=60) as client:
        for endpoint in BODIES:
            each_body(endpoint, partial(compare, endpoint), TRIED, number=2)
    print(dict(results))
    assert all(results[endpoint, "equal"] > TRIED / 3 for endpoint in BODIES)
