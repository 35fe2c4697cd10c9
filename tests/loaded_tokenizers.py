"""Loads each tokenizer once a process: to load one with its fast backend takes two seconds of CPU.

Not for tests that change a tokenizer: they copy it, or load their own.
"""

from __future__ import annotations

from functools import cache

from loadtest.commands.mock_engine_command import TOKENIZER, mock_tokenizer
from router.config.tokenizer_files import TokenizerSource, load_tokenizer
from router.prompt.tokenizer import Tokenizer


@cache
def _loaded(source: TokenizerSource, fast: bool) -> Tokenizer:
    return load_tokenizer(source, fast=fast)


def loaded_tokenizer(source: TokenizerSource, *, fast: bool = True) -> Tokenizer:
    """The only tokenizer of this source in this process, shared with the commands that run in it."""
    return mock_tokenizer() if fast and source == TOKENIZER else _loaded(source, fast)
