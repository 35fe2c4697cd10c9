"""How much work texts are that engines embed, score or rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from router.prompt.completion import count_tokens, only_text
from router.prompt.conversation import Unrenderable


def words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def counted(**fields: Any) -> int:
    return count_tokens({name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}, words)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [("a b c", 3), (["a b", "c"], 3), ([5, 6, 7], 3), ([[5, 6], [7]], 3), ([[5], "a b"], 3), ([], 0), ("", 0)],
    ids=str,
)
def test_texts_to_embed_are_as_long_as_all_of_them(given: Any, tokens: int) -> None:
    """Texts and ids, one or several."""
    assert counted(input=given) == tokens


def test_only_one_text_to_embed_has_a_prefix() -> None:
    """Raw or decoded, of nothing that a query is paired with."""
    raw = msgspec.Raw(b'"a"')
    assert (only_text({"input": raw}), only_text({"input": "a", "model": "m"})) == (raw, "a")
    for fields in ({}, {"input": msgspec.Raw(b'["a"]')}, {"input": raw, "query": raw}, {"input": raw, "padding": raw}):
        assert only_text(fields) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"query": "a b", "documents": ["c", "d e", {"text": "f", "id": 7}]},
        {"queries": "a b", "items": ["c", "d e", "f"]},
        {"text_1": ["a b"], "text_2": ["c", "d e", "f"]},
        {"data_1": ["a b", "a b", "a b"], "data_2": ["c", "d e", "f"]},
    ],
    ids=str,
)
def test_a_query_is_computed_with_each_document(fields: dict[str, Any]) -> None:
    """Three pairs: the query three times, and the documents."""
    assert counted(**fields) == 3 * 2 + 4


@pytest.mark.parametrize("raw", [b"null", b"7", b'{"content":[]}', b'[{"image_url":"x"}]', b"[null]", b'["\\ud800"]'])
def test_anything_else_is_not_read(raw: bytes) -> None:
    """Pictures and chats count by the bytes of the body, and so do texts that are not Unicode."""
    with pytest.raises(Unrenderable):
        count_tokens({"input": msgspec.Raw(raw)}, lambda texts: [len(text.encode()) for text in texts])
