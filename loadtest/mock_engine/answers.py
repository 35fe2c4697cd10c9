"""Decides what a mock engine answers: the answer that the prompt lists, else words.

An answer depends on the prompt's tokens alone, or on the seed if it is sampled. A prompt of token ids that ends with
the beginning of its answer gets the rest of it, from any engine.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from random import Random
from typing import NamedTuple

from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.output_parser import OutputParser
from loadtest.mock_engine.request_bodies import AskedChat, AskedGeneration
from loadtest.mock_engine.vocabulary import MARKUP, GeneratedText, Vocabulary
from router.hashing import token_array
from router.types import Endpoint


class Prompt(NamedTuple):
    """A prompt, and the tokens of the answer that it lists, if it lists one. `is_given`: as token ids, so that it may
    end with the beginning of its answer."""

    tokens: array[int]
    answer: array[int] = token_array()
    is_given: bool = False


class Answers:
    def __init__(self, config: MockEngineConfig, end_token: int) -> None:
        self._max_tokens = config.max_model_len
        self._end = end_token
        self._parser = OutputParser(config.tokenizer, end_token)
        self.vocabulary = Vocabulary(config.tokenizer, end_token)

    def output(
        self, endpoint: Endpoint, body: AskedGeneration, prompt: Prompt, max_tokens: int | None
    ) -> GeneratedText:
        available = self._max_tokens - len(prompt.tokens)
        limit = available if max_tokens is None else min(max_tokens, available)
        output = self._listed(endpoint, prompt, limit) if prompt.answer else None
        output = output or self._words(endpoint, body, prompt.tokens, max_tokens, limit)
        strings = [body.stop] if isinstance(body.stop, str) else body.stop or []
        if strings:
            output = output.stopped_by(strings, body.min_tokens or 0, included=body.include_stop_str_in_output)
        if isinstance(body, AskedChat) and prompt.is_given and not body.tools:
            output = replace(output, counts_content=self._parser.ends_reasoning(prompt.tokens) is True)
        return output

    def _listed(self, endpoint: Endpoint, prompt: Prompt, limit: int) -> GeneratedText:
        answer = prompt.answer
        if prompt.is_given:
            sizes = range(min(len(answer), len(prompt.tokens)), -1, -1)
            said = next(size for size in sizes if prompt.tokens[len(prompt.tokens) - size :] == answer[:size])
            answer = answer[said:] or token_array([self._end])
        tokens = tuple(answer[:limit])
        parse = self._parser.plain if endpoint is Endpoint.COMPLETIONS else self._parser.parse
        output = GeneratedText(tokens, parse(prompt.tokens, tokens), "stop" if len(answer) <= limit else "length")
        calls = output.finish_reason == "stop" and output.call is not None
        return replace(output, finish_reason="tool_calls") if calls else output

    def _words(
        self, endpoint: Endpoint, body: AskedGeneration, prompt: array[int], max_tokens: int | None, limit: int
    ) -> GeneratedText:
        """`max_tokens` is the exact length where clients need not limit it, so that load tests can choose the length;
        agents' APIs have `min_tokens` for that."""
        is_sampled = body.seed is not None if body.temperature is None else body.temperature > 0
        draws = Random(body.seed) if is_sampled else None
        length = None if endpoint.api.is_converted else max_tokens
        least = body.min_tokens or 0 if endpoint.api.is_converted else 0
        if prompt[-1] != self._parser.think or endpoint is Endpoint.COMPLETIONS or limit < 2:
            return self.vocabulary.generate(prompt, length, limit, least, draws)
        assert self._parser.end_think is not None
        end_think = token_array([self._parser.end_think])  # it thinks nothing
        length = None if length is None else length - 1
        output = self.vocabulary.generate(prompt + end_think, length, limit - 1, least, draws)
        return replace(output, tokens=(*end_think, *output.tokens), pieces=(MARKUP, *output.pieces))
