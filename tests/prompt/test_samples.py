"""The texts on which tokenizers are compared."""

from __future__ import annotations

from router.prompt.samples import SAMPLED_TOKENS, TEXTS, samples


def test_all_fixed_texts_are_included_and_encodable() -> None:
    """Also without added tokens; none contains a lone surrogate."""
    assert set(samples([])) >= set(TEXTS)
    assert all(text.encode("utf-8").decode("utf-8") == text for text in samples(["<s>"]))


def test_added_tokens_are_tried_next_to_letters_spaces_and_each_other() -> None:
    """Whole and broken, where implementations differ."""
    texts = samples(["<a>", "<b>"])
    assert {"x<a>y", "x <a> y", "<a><a>", "<a", "<a><b>"} <= set(texts)


def test_at_most_a_few_dozen_added_tokens_are_tried() -> None:
    """They are chosen from the whole range."""
    texts = samples([f"<unused{i}>" for i in range(5000)])
    assert len(texts) < len(TEXTS) + 8 * (SAMPLED_TOKENS + 2)
    assert any("<unused4" in text for text in texts)


def test_some_texts_are_long() -> None:
    """Caches and chunked algorithms of tokenizers need them."""
    assert max(map(len, samples(["<a>"]))) > 5000
