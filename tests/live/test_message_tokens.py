"""The router gives thousands of bodies of `/v1/messages` and `/v1/responses` the tokens that a real vLLM gives them."""

from __future__ import annotations

from collections import Counter
from functools import partial

import httpx
import pytest

from router.config.tokenizer_files import TokenizerSource, load_tokenizer
from router.engines.engine_catalog import ENGINES
from router.prompt.conversation import Unrenderable
from router.prompt.fingerprint import Fingerprinter
from router.prompt.template import ChatTemplate
from router.types import Endpoint, Generation
from tests.kit import scenes
from tests.live.engines import HOME
from tests.live.message_bodies import Body
from tests.live.message_goldens import BODIES, RENDERERS, STRICT, each_body, is_rendered_alike, rendered, renderer

pytestmark = [pytest.mark.live, pytest.mark.net]

TRIED = 1500
PORT = 18141


@pytest.mark.parametrize("name", RENDERERS)
def test_every_body_has_the_engines_tokens(name: str) -> None:
    """The templates are one with tools and thinking, the demo's, and one that refuses late system messages. What the
    engine accepts is read, and what it refuses is not refused by the router."""
    source = TokenizerSource(
        str(HOME / "model" / ("tiny-llama" if name == "strict" else name)), str(STRICT) if name == "strict" else None
    )
    tokenizer = load_tokenizer(source, fast=True)
    fingerprinter = Fingerprinter(tokenizer, ChatTemplate(tokenizer), Generation(model="tiny"))
    results: Counter[str] = Counter()

    def compare(endpoint: Endpoint, body: Body) -> None:
        conversion = ENGINES["vllm"].conversions[endpoint]
        request = scenes.request(endpoint=endpoint, model="tiny", body=b"", prompt=body)
        if not is_rendered_alike(name, body):
            return
        engine = rendered(client, endpoint, body)
        try:
            ours = list(fingerprinter.fingerprint(request, conversion).tokens)
        except Unrenderable:
            ours = None
        results["refused" if engine is None else endpoint] += 1
        assert engine is None or ours == engine, body

    with renderer(name, PORT) as engine, httpx.Client(base_url=engine.url, timeout=60) as client:
        for endpoint in BODIES:
            each_body(endpoint, partial(compare, endpoint), TRIED, number=1)
    print(name, dict(results))
    assert all(results[endpoint] > TRIED / 2 for endpoint in BODIES)
