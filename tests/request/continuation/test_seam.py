"""Where another pod may go on."""

from __future__ import annotations

from collections.abc import Sequence

from router.request.continuation.answer_words import AnswerWords
from router.request.continuation.plan import WINDOW_TOKENS, Seam, find_seam
from router.request.continuation.stream import Record
from router.request.continuation.terms import terms_of
from router.types import Endpoint


def test_a_long_answer_is_decoded_once() -> None:
    """Only the last tokens are, for each place where the seam may be."""
    decoded = 0

    def text_of(ids: Sequence[int], _special: bool) -> str:
        nonlocal decoded
        decoded += len(ids)
        return "a" * len(ids)

    terms = terms_of(Endpoint.COMPLETIONS, b'{"prompt":"a","stream":true}')
    record = Record()
    record.ids.extend([1] * 50_000)
    record.content += b"a" * (50_000 - WINDOW_TOKENS // 2)
    seam = find_seam(record, (), terms, AnswerWords(text_of))
    assert seam == Seam(50_000 - WINDOW_TOKENS // 2)
    assert decoded <= 50_000 + WINDOW_TOKENS * (WINDOW_TOKENS + 16)
