"""Encodes text into the tokens that the engine will see.

The reference is the `tokenizers` library behind `transformers`, because engines use it. `fastokens` is a hundred times
faster. It is used only if it gives equal tokens on every sample, and is disabled after a difference on live traffic.
Files are read in `config/tokenizer_files.py`.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from router.hashing import token_array
from router.prompt.samples import samples

REFERENCE = "transformers"
MAX_DECODED_AT_ONCE = 1024
"""Tokens whose text is decoded without other threads: in 0.2 ms."""


class Tokenizer:
    """One model's tokenizer. Any thread may encode, and any thread may disable the fast backend.

    Texts must be encodable as UTF-8; `UnicodeError` or `TypeError` for a lone surrogate."""

    def __init__(
        self,
        reference: Any,
        fingerprint: str,
        special_tokens: Mapping[str, str],
        chat_template: str | Mapping[str, str] | None,
    ) -> None:
        """`reference` is a `tokenizers.Tokenizer`; its truncation and padding are switched off."""
        self._reference = reference
        self._reference.no_truncation()
        self._reference.no_padding()
        self._fast: Any = None
        self.backend = REFERENCE
        """`fastokens` or `transformers`."""
        self.reason = "fast_tokenizer is off"
        self.fingerprint = fingerprint
        """Hex digest of tokenizer.json, its configuration and the chat template."""
        self.chat_template = chat_template
        """The template's text; several by name for the few models that have `default` and `tool_use`."""
        self.special_tokens = special_tokens
        """Variables of the template: `bos_token`, `eos_token`, ..."""
        vocabulary: dict[str, int] = self._reference.get_vocab(with_added_tokens=True)
        self.vocabulary_size = max(vocabulary.values()) + 1
        """Highest token id plus one."""
        split = self._reference.pre_tokenizer
        self.splits_words = split is not None and len(split.pre_tokenize_str("two words")) > 1
        """Whether words are encoded one by one: long texts of short words then take little time."""
        decoder: dict[int, Any] = self._reference.get_added_tokens_decoder()
        self.added_tokens = tuple(decoder[token] for token in sorted(decoder))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> array[int]:
        """Tokens of `text`; with `add_special_tokens`, also those that the tokenizer puts around it."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[array[int]]:
        """Tokens of each text. Disables the fast backend if it fails on a valid text."""
        fast = self._fast
        if fast is not None:
            try:
                return encode_fast(fast, texts, add_special_tokens)
            except (ValueError, RuntimeError) as error:
                if isinstance(error, UnicodeError):
                    raise
                self.distrust(f"fastokens failed: {error}")
        return encode_reference(self._reference, texts, add_special_tokens)

    def text_of(self, tokens: Sequence[int], special: bool) -> str:
        """The text of tokens. `special`: with that of special tokens."""
        text: str
        if len(tokens) > MAX_DECODED_AT_ONCE:  # the batch form releases the GIL, and takes longer for a few
            (text,) = self._reference.decode_batch([tokens], skip_special_tokens=not special)
        else:
            text = self._reference.decode(tokens, skip_special_tokens=not special)
        return text

    def id_of(self, token: str) -> int | None:
        """The id of a token; None if there is none of this name."""
        found: int | None = self._reference.token_to_id(token)
        return found

    def encode_slowly(self, text: str, *, add_special_tokens: bool = False) -> array[int]:
        """Tokens of `text` by the reference: for samples of the traffic, off the request path."""
        return encode_reference(self._reference, [text], add_special_tokens)[0]

    def decode_stream(self, prompt: array[int], *, skip_special_tokens: bool) -> Callable[[int], str | None]:
        """Decodes the tokens behind `prompt` one by one: the text of each, None inside a character."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(ids=prompt.tolist(), skip_special_tokens=skip_special_tokens)
        return partial(stream.step, self._reference)

    def distrust(self, reason: str) -> None:
        """Disable the fast backend until the next start."""
        self._fast, self.backend, self.reason = None, REFERENCE, reason

    @property
    def normalizes(self) -> bool:
        """Whether text changes before it is split (NFC, lower case, ...)."""
        normalizer = self._reference.normalizer
        return normalizer is not None and json.loads(normalizer.__getstate__()).get("normalizers") != []

    def adopt_fast(self) -> None:
        """Use `fastokens` if it can read this tokenizer and gives equal tokens on every sample. Sets `reason`."""
        fast, reason = fast_equal_to(self._reference, samples([token.content for token in self.added_tokens]))
        if fast is not None:
            self._fast, self.backend = fast, "fastokens"
        self.reason = reason


def fast_equal_to(reference: Any, texts: Sequence[str]) -> tuple[Any, str]:
    """(a `fastokens` tokenizer that gave equal tokens on all `texts`, or None; the reason)."""
    try:
        import fastokens
    except ImportError:
        return None, "fastokens is not installed"
    try:
        fast = fastokens.Tokenizer.from_json_str(reference.to_str())
        for special in (False, True):
            theirs = encode_reference(reference, texts, special)
            ours = encode_fast(fast, texts, special)
            for text, expected, got in zip(texts, theirs, ours, strict=True):
                if expected != got:
                    return None, f"fastokens differs on {text[:40]!r}"
    except Exception as error:  # fastokens raises different types for tokenizers it cannot read
        return None, f"fastokens refused: {error}"
    return fast, f"fastokens equal on {len(texts)} samples"


def encode_reference(backend: Any, texts: Sequence[str], add_special_tokens: bool) -> list[array[int]]:
    """Tokens of each text by `tokenizers.Tokenizer`. The batch form, because only that releases the GIL; one text per
    call, because several wake a thread pool, which costs more than encoding the few pieces of a prompt."""
    encode = backend.encode_batch_fast
    return [token_array(encode((text,), add_special_tokens=add_special_tokens)[0].ids) for text in texts]


def encode_fast(fast: Any, texts: Sequence[str], add_special_tokens: bool) -> list[array[int]]:
    """Tokens of each text by `fastokens.Tokenizer`, as a flat buffer; called as in `encode_reference`."""
    encode = fast.encode_batch_flat
    return [array("I", encode((text,), add_special_tokens=add_special_tokens)[0]) for text in texts]
