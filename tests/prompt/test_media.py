"""Chats with pictures: what is exact in front of the first one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import MalformedRequest
from router.hashing import generation_seed, hash_blocks
from router.prompt.conversation import UnreadReason, Unrenderable
from router.prompt.fingerprint import Fingerprinter
from router.prompt.media import MARKER, TOKENS, may_have_media, media_parts
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer
from router.types import Endpoint, Generation, InferenceRequest
from tests.prompt.conftest import TEMPLATE

BLOCK = 4
MODEL = Generation(model="m", revision="r", block_size_tokens=BLOCK)
Make = Callable[..., InferenceRequest]

PLACEHOLDER = "<｜tool▁output▁begin｜>"
OF_PARTS = """\
{% for message in messages %}{{ '<｜User｜>' if message.role == 'user' else '<｜Assistant｜>' }}
{%- for part in message.content %}
{%- if part.type == 'image' %}<｜tool▁output▁begin｜>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endfor %}<｜Assistant｜>"""
PICTURES_FIRST = """\
{% for message in messages %}<｜User｜>
{%- for part in message.content %}{% if part.type == 'image' %}<｜tool▁output▁begin｜>{% endif %}{% endfor %}
{%- for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
{%- endfor %}<｜Assistant｜>"""
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TEXT = "Please describe what is to be seen in this picture: "


def chat(*content: Any) -> list[dict[str, Any]]:
    said = [{"role": "user", "content": "one two three four"}, {"role": "assistant", "content": "five six seven"}]
    return [*said, {"role": "user", "content": list(content)}]


def front_of(template: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    found = template.render_media({"messages": messages})
    return found.text[: found.exact]


def test_the_exact_text_ends_at_the_first_placeholder(deepseek: Tokenizer) -> None:
    """Where the template puts it: in its place, or in front of the message's text. Not at what follows."""
    start = "<｜User｜>one two three four<｜Assistant｜>five six seven<｜User｜>"
    messages = chat({"type": "text", "text": TEXT}, PICTURE, {"type": "text", "text": "<｜tool▁"}, PICTURE)
    assert front_of(ChatTemplate(deepseek, OF_PARTS), messages) == start + TEXT
    first = [{**message, "role": "user"} for message in messages]
    assert front_of(ChatTemplate(deepseek, PICTURES_FIRST), first) == start.replace("Assistant", "User")


def test_where_contents_are_strings_nothing_of_the_message_is_exact(deepseek: Tokenizer) -> None:
    """Engines put placeholders in front of its text. All earlier messages are exact."""
    messages = chat({"type": "text", "text": TEXT}, PICTURE)
    found = ChatTemplate(deepseek, TEMPLATE).render_media({"messages": messages})
    assert found.text[: found.exact].endswith("five six seven" + deepseek.special_tokens["eos_token"] + "<｜User｜>")
    assert MARKER not in found.text


@pytest.mark.parametrize("text", [OF_PARTS, TEMPLATE])
def test_hashes_cover_only_what_is_in_front_of_the_first_picture(
    deepseek: Tokenizer, make_request: Make, text: str
) -> None:
    """They are those of the text alone; the tokens have a placeholder for each picture and all text."""
    template = ChatTemplate(deepseek, text)
    fingerprinter = Fingerprinter(deepseek, template, MODEL)
    messages = chat({"type": "text", "text": TEXT}, PICTURE, {"type": "text", "text": "word " * 50})
    found = template.render_media({"messages": messages})
    for _ in range(2):
        prefix = fingerprinter.fingerprint(make_request(messages=messages))
        front = deepseek.encode(found.text[: fingerprinter.segments.cuts.safe_end(found.text, found.exact)])
        assert (prefix.media_tokens, list(prefix.tokens[: len(front)])) == (TOKENS, list(front))
        assert prefix.hashes == hash_blocks(front, BLOCK, generation_seed(prefix.generation))
        assert 2 <= len(prefix.hashes) < len(prefix.tokens) // BLOCK
        assert list(prefix.tokens) == list(deepseek.encode(found.text))
        assert prefix.token_count == len(prefix.tokens) + TOKENS


def test_a_picture_that_no_added_token_follows_shortens_the_exact_text(deepseek: Tokenizer) -> None:
    """Text and placeholder could share a token. Without cuts nothing is exact."""
    cuts = Fingerprinter(deepseek, None, MODEL).segments.cuts
    text = "<｜User｜>one<｜Assistant｜>two <image>"
    assert cuts.safe_end(text, text.index("<image>")) == text.index("<｜Assistant｜>")
    assert cuts.safe_end("two <image>", 4) == 0


TEXTS = st.text(st.sampled_from("ab \n<｜>é"), max_size=12)
CONTENTS = st.lists(st.one_of(TEXTS, st.just(PICTURE)), min_size=1, max_size=4)


@given(contents=st.lists(CONTENTS, min_size=1, max_size=4), other=CONTENTS)
def test_the_exact_text_does_not_depend_on_what_follows(
    deepseek: Tokenizer, contents: list[list[Any]], other: list[Any]
) -> None:
    """No picture, no text behind it and no further turn changes the text or its tokens."""
    template = ChatTemplate(deepseek, OF_PARTS)
    cuts = Fingerprinter(deepseek, None, MODEL).segments.cuts
    messages = [{"role": "user", "content": ["start"]}, *({"role": "user", "content": parts} for parts in contents)]
    messages.append({"role": "user", "content": [PICTURE]})
    found = template.render_media({"messages": messages})
    longer = template.render_media({"messages": [*messages, {"role": "user", "content": other}]})
    assert found.text[: found.exact] == longer.text[: longer.exact]
    front = found.text[: cuts.safe_end(found.text, found.exact)]
    assert PLACEHOLDER not in front
    tokens = deepseek.encode(front)
    assert deepseek.encode(longer.text)[: len(tokens)] == tokens


def test_messages_of_anthropic_have_the_same_prefix(deepseek: Tokenizer, make_request: Make) -> None:
    from router.engines.engine_catalog import ENGINES

    fingerprinter = Fingerprinter(deepseek, ChatTemplate(deepseek, OF_PARTS), MODEL)
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    content = [{"type": "text", "text": TEXT}, {"type": "image", "source": source}]
    request = make_request(Endpoint.MESSAGES, messages=[{"role": "user", "content": content}])
    found = fingerprinter.fingerprint(request, ENGINES["vllm"].conversions[Endpoint.MESSAGES])
    chat = make_request(messages=[{"role": "user", "content": [{"type": "text", "text": TEXT}, PICTURE]}])
    assert found == fingerprinter.fingerprint(chat)
    assert len(found.hashes) > 1


def test_a_template_that_leaves_pictures_out_is_left_to_the_engine(deepseek: Tokenizer, make_request: Make) -> None:
    """So is one that refuses them."""
    for text in ("{{ messages[0].role }}", "{% for m in messages %}{{ m.content[0].text + '' }}{% endfor %}"):
        fingerprinter = Fingerprinter(deepseek, ChatTemplate(deepseek, text, "openai"), MODEL)
        with pytest.raises(Unrenderable) as caught:
            fingerprinter.fingerprint(make_request(messages=chat(PICTURE)))
        assert caught.value.reason is UnreadReason.MEDIA


def test_what_is_no_picture_is_refused_as_before(deepseek: Tokenizer) -> None:
    template = ChatTemplate(deepseek, OF_PARTS)
    with pytest.raises(MalformedRequest):
        template.render_media({"messages": chat(PICTURE, 7)})
    with pytest.raises(Unrenderable):
        template.render_media({"messages": chat(PICTURE, {"type": "of_the_future"})})


def test_a_body_without_the_words_of_media_needs_no_decoding() -> None:
    """An escape may hide a word."""
    assert not may_have_media(b'{"messages":[{"content":"hi"}]}')
    assert may_have_media(b'{"messages":[{"content":[{"type":"\\u0069mage_url"}]}]}')
    assert len(media_parts([{"content": "x"}, 3, {"content": [{"input_audio": {}}]}])) == 1
    assert not media_parts([{"content": [{"type": "text"}, "image", {"type": ["image_url"]}]}])
