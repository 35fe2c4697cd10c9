"""What continuing a stream needs of the model's tokenizer and template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from router.prompt.apis.conversion import Conversion

HALF = "\ufffd"
"""A text that ends with it ends inside a character."""
MAX_HALF_TOKENS = 8
"""A character of an answer has at most as many tokens."""
CONTEXT = 8
"""Tokens in front that a text may depend on: tokenizers treat the first token of a text differently."""

_CALLS = ("<tool_call>", "<｜tool▁calls▁begin｜>")
"""What begins calls: of Qwen and Hermes, and of DeepSeek."""


@dataclass(frozen=True, slots=True)
class AnswerWords:
    """`text_of` returns the text of ids: with special tokens, or without. Ids are None where no token has that name."""

    text_of: Callable[[Sequence[int], bool], str]
    think: int | None = None
    end_think: int | None = None
    tool_call: int | None = None
    messages: Conversion | None = None
    """How vLLM makes a chat of the body of a message."""

    def text(self, ids: Sequence[int], begin: int, end: int, *, special: bool) -> str:
        """The text of a slice, as it is behind what is in front of it."""
        context = max(begin - CONTEXT, 0)
        before = self.text_of(ids[context:begin], special)
        return self.text_of(ids[context:end], special)[len(before) :]


WordsOf: TypeAlias = Callable[[str], AnswerWords | None]
"""What is known of a model; None where its tokenizer is not."""


def answer_words(
    text_of: Callable[[Sequence[int], bool], str],
    id_of: Callable[[str], int | None],
    messages: Conversion | None = None,
) -> AnswerWords:
    """What a tokenizer knows, and how messages become chats."""
    calls = (found for name in _CALLS if (found := id_of(name)) is not None)
    return AnswerWords(text_of, id_of("<think>"), id_of("</think>"), next(calls, None), messages)
