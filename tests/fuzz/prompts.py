"""Fuzzes bodies of chats, completions and messages with a real chat template and a small real tokenizer.

A body is malformed, or its tokens are the same every time and the request is unchanged.
"""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from functools import cache
from typing import Any, get_args

import msgspec
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from router.engines.engine_catalog import ENGINES
from router.errors import MalformedRequest
from router.hashing import generation_seed, hash_blocks, token_array
from router.prompt.apis.conversion import Conversion
from router.prompt.conversation import ContentFormat, Unrenderable
from router.prompt.fingerprint import Fingerprinter
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer
from router.request.parse import PARSERS
from router.types import Endpoint, Generation
from tests.fuzz.bodies import JSON
from tests.kit import scenes

CHATS = {
    found[Endpoint.CHAT]
    for engine in ENGINES.values()
    for found in (engine.conversions, *engine.front_ends.values())
    if Endpoint.CHAT in found
}
"""How engines and their front ends read chats in their own ways."""
GENERATION = Generation(model="m", block_size_tokens=4)
TEMPLATE = """\
{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<|start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|end|>
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{{ '<think>' if enable_thinking }}{% endif %}"""


@cache
def _tokenizer() -> Tokenizer:
    """One token per byte, and two special tokens."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = Library(models.BPE(vocabulary, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens([AddedToken(marker, normalized=False) for marker in ("<|start|>", "<|end|>")])
    return Tokenizer(library, "fingerprint", {}, None)


@cache
def _warm() -> list[Fingerprinter]:
    """One per content format, with the cache of earlier inputs."""
    return [_fingerprinter(content_format) for content_format in get_args(ContentFormat)]


def _fingerprinter(content_format: ContentFormat) -> Fingerprinter:
    return Fingerprinter(_tokenizer(), ChatTemplate(_tokenizer(), TEMPLATE, content_format), GENERATION)


def prompts(data: bytes) -> None:
    """The body of a chat, a completion or a message, converted as each engine does."""
    for endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS):
        with suppress(MalformedRequest):
            fields = PARSERS[endpoint].prompt_fields(PARSERS[endpoint].parse(data))
            for content_format, warm in zip(get_args(ContentFormat), _warm(), strict=True):
                with suppress(MalformedRequest, Unrenderable):
                    _check_tokens(endpoint, fields, warm, content_format)
    with suppress(MalformedRequest):
        fields = PARSERS[Endpoint.CHAT].prompt_fields(PARSERS[Endpoint.CHAT].parse(data))
        for kind in CHATS:
            for content_format, warm in zip(get_args(ContentFormat), _warm(), strict=True):
                with suppress(MalformedRequest, Unrenderable):
                    _check_tokens(Endpoint.CHAT, fields, warm, content_format, kind)
    with suppress(MalformedRequest):
        fields = PARSERS[Endpoint.MESSAGES].prompt_fields(PARSERS[Endpoint.MESSAGES].parse(data))
        for engine in ENGINES.values():
            if conversion := engine.conversions.get(Endpoint.MESSAGES):
                for content_format, warm in zip(get_args(ContentFormat), _warm(), strict=True):
                    with suppress(Unrenderable):
                        _check_tokens(Endpoint.MESSAGES, fields, warm, content_format, conversion)


def _check_tokens(
    endpoint: Endpoint,
    fields: dict[str, Any],
    warm: Fingerprinter,
    content_format: ContentFormat,
    conversion: type[Conversion] | None = None,
) -> None:
    request = scenes.request(endpoint=endpoint, body=b"", prompt=deepcopy(fields))
    prefix = warm.fingerprint(request, conversion)
    assert msgspec.json.encode(request.prompt) == msgspec.json.encode(fields), "the request has changed"
    hashes = hash_blocks(token_array(prefix.tokens), 4, generation_seed(prefix.generation))
    assert list(prefix.hashes) == list(hashes[: len(prefix.hashes)])
    assert prefix.media_tokens or len(prefix.hashes) == len(hashes)
    assert warm.fingerprint(request, conversion) == prefix
    assert _fingerprinter(content_format).fingerprint(request, conversion) == prefix, (
        "what is remembered makes a difference"
    )


PROMPTS = (
    b'{"model":"m","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":[{"type":"text",'
    b'"text":"h"},{"type":"refusal","refusal":null},"x"]},{"role":"assistant","content":null,"reasoning":"r","tool_calls":[{"id":"1",'
    b'"type":"function","function":{"name":"f","arguments":"{\\"a\\":1}"}}]},{"role":"tool",'
    b'"tool_call_id":"1","content":"ok"}]}',
    b'{"model":"m","messages":[{"role":"developer","content":"d","tools":[{"type":"function","function":{"name":"f"}}]},'
    b'{"role":"user","content":"x-anthropic-billing-header: 1\\nhi"}],"tools":[{"type":"function","function":'
    b'{"name":"f","parameters":{}}}],"reasoning_effort":"low","chat_template_kwargs":{"enable_thinking":true},"documents":[{"a":1}]}',
    b'{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}',
    b'{"model":"m","messages":[{"role":"user","content":["in front",{"type":"image_url","image_url":{"url":"x"}}]},'
    b'{"role":"assistant","content":"ok"},{"role":"user","content":["b",{"type":"input_audio"},{"image_url":1}]}]}',
    b'{"model":"m","messages":[{"role":"developer","content":"d","tools":5}],"reasoning_effort":["low"]}',
    b'{"model":"m","messages":[{"role":"user","content":"h"}],"chat_template_kwargs":{"a":1e400,"b":-0}}',
    b'{"model":"m","messages":[{"role":"user","content":"h"}],"chat_template_kwargs":{"a":%b}}' % (b"9" * 400),
    b'{"model":"m","prompt":[1,2,3,4,5,256]}',
    b'{"model":"m","max_tokens":1,"system":[{"type":"text","text":"x-anthropic-billing-header: a=b;"},{"type":"text",'
    b'"text":"S"}],"tools":[{"name":"f","input_schema":{"properties":{}}}],"messages":[{"role":"user","content":[{"type":'
    b'"tool_result","tool_use_id":"t","content":[{"type":"text","text":"1"}],"is_error":true},{"type":"text","text":"h"}]}]}',
    b'{"model":"m","thinking":{"type":"disabled"},"messages":[{"role":"assistant","content":[{"type":"thinking",'
    b'"thinking":"r"},{"type":"tool_use","id":"t","name":"f","input":{"a":1}}]},{"role":"system","content":[{"type":'
    b'"tool_removal","tool":{"type":"tool_reference","name":"f"}}]}],"tools":[{"name":"f","input_schema":{}}]}',
    b'{"model":"m","prompt":["<|start|>one","two"],"add_special_tokens":false}',
    b'{"model":"m","prompt":[[1,2],[3]],"truncate_prompt_tokens":1}',
)
PROMPT_WORDS = (
    *JSON,
    *(
        b'"%b":' % name
        for name in (b"role", b"content", b"type", b"text", b"tool_calls", b"function", b"arguments", b"name")
    ),
    *(
        b'"%b"' % word
        for word in (b"system", b"user", b"assistant", b"tool", b"developer", b"text", b"refusal", b"thinking")
    ),
    *(
        b"<|start|>",
        b"<|end|>",
        b'"tools":',
        b'"messages":',
        b'"prompt":',
        b'"chat_template_kwargs":',
        b'"defer_loading":',
    ),
)
