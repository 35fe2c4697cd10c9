"""How does text become the tokens that the engine will see?

`transformers` is the reference, because engines use it. `fastokens` is a hundred times faster and stands in for it
only after it gave equal tokens on every sample; whoever compares the two on live traffic can end that for good.
This file never renders a chat and never reads a model's weights.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from router.prompt.backends import encode_fast, encode_reference, fast_equal_to
from router.prompt.samples import samples


class Tokenizer:
    """One model's tokenizer. Any thread may encode, and any thread may end the trust in the fast backend.

    Texts must be encodable as UTF-8; `UnicodeError` or `TypeError` for half a surrogate pair."""

    fingerprint: str
    """Hex digest of what decides tokens: tokenizer.json, its configuration and the chat template."""
    backend: str
    """`fastokens` or `transformers`."""
    reason: str
    """Why this backend."""
    vocabulary_size: int
    """Highest token id plus one."""
    special_tokens: Mapping[str, Any]
    """What the template may name: `bos_token`, `eos_token`, ..."""
    chat_template: str | Mapping[str, str] | None
    """The template's text; several by name for the few models that ship `default` and `tool_use`."""
    added_tokens: tuple[Any, ...]
    """Every `tokenizers.AddedToken`, in order of id."""

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
        self.backend = "transformers"
        self.reason = "fast_tokenizer is off"
        self.fingerprint = fingerprint
        self.chat_template = chat_template
        self.special_tokens = special_tokens
        self.vocabulary_size = max(self._reference.get_vocab(with_added_tokens=True).values()) + 1
        decoder: dict[int, Any] = self._reference.get_added_tokens_decoder()
        self.added_tokens = tuple(decoder[token] for token in sorted(decoder))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> array[int]:
        """Tokens of `text`, with those that the tokenizer puts around a text if asked for."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[array[int]]:
        """Tokens of each text. Leaves the fast backend for good if it fails where it must not."""
        fast = self._fast
        if fast is not None:
            try:
                return encode_fast(fast, texts, add_special_tokens)
            except (ValueError, RuntimeError) as error:
                if isinstance(error, UnicodeError):
                    raise
                self.distrust(f"fastokens failed: {error}")
        return encode_reference(self._reference, texts, add_special_tokens)

    def verify(self, text: str) -> bool:
        """Do both backends agree on this text? Slow: for a sample of the traffic, off the request path."""
        return self.encode(text) == encode_reference(self._reference, [text], False)[0]

    def distrust(self, reason: str) -> None:
        """From now on only `transformers` encodes."""
        self._fast, self.backend, self.reason = None, "transformers", reason

    @property
    def normalizes(self) -> bool:
        """Does text change before it is split (NFC, lower case, ...)?"""
        normalizer = self._reference.normalizer
        return normalizer is not None and json.loads(normalizer.__getstate__()).get("normalizers") != []

    def adopt_fast(self) -> None:
        """Let `fastokens` encode if it reads this tokenizer and is equal on every sample; `reason` tells."""
        fast, reason = fast_equal_to(self._reference, samples([token.content for token in self.added_tokens]))
        if fast is not None:
            self._fast, self.backend = fast, "fastokens"
        self.reason = reason
