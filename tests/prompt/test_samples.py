"""The texts on which tokenizers are compared."""

from __future__ import annotations

from router.prompt.samples import SAMPLED_TOKENS, TEXTS, samples


def test_every_fixed_text_is_there_and_all_can_be_encoded() -> None:
    """Also without any added token, and none holds half a surrogate pair."""
    assert set(samples([])) >= set(TEXTS)
    assert all(text.encode("utf-8").decode("utf-8") == text for text in samples(["<s>"]))


def test_added_tokens_are_tried_beside_letters_spaces_themselves_and_each_other() -> None:
    """Whole and broken: places where implementations differ."""
    texts = samples(["<a>", "<b>"])
    assert {"x<a>y", "x <a> y", "<a><a>", "<a", "<a><b>"} <= set(texts)


def test_thousands_of_added_tokens_cost_no_more_than_a_few_dozen() -> None:
    """The chosen ones come from the whole range."""
    texts = samples([f"<unused{i}>" for i in range(5000)])
    assert len(texts) < len(TEXTS) + 8 * (SAMPLED_TOKENS + 2)
    assert any("<unused4" in text for text in texts)


def test_some_texts_are_long() -> None:
    """Caches inside tokenizers and chunked algorithms only show there."""
    assert max(map(len, samples(["<a>"]))) > 5000
