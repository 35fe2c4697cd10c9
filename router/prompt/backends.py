"""Which library encodes, and is it right?

`fastokens` is about a hundred times faster than the `tokenizers` that engines use through `transformers`, but it is
another implementation: it must prove itself on texts. Both turn texts into flat arrays of tokens here. This file
never loads a tokenizer's files.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from router.hashing import token_array


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
    except Exception as error:  # whatever a foreign library raises: it cannot read this tokenizer
        return None, f"fastokens refused: {error}"
    return fast, f"fastokens equal on {len(texts)} samples"


def encode_reference(backend: Any, texts: Sequence[str], add_special_tokens: bool) -> list[array[int]]:
    """Tokens of each text by `tokenizers.Tokenizer`. The batch form, because only that releases the GIL."""
    encodings = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    return [token_array(encoding.ids) for encoding in encodings]


def encode_fast(fast: Any, texts: Sequence[str], add_special_tokens: bool) -> list[array[int]]:
    """Tokens of each text by `fastokens.Tokenizer`: a buffer of tokens, no object a token. One text a call, because
    several wake a pool of threads, which costs more than a prompt's few pieces do."""
    encode = fast.encode_batch_flat
    return [array("I", encode((text,), add_special_tokens=add_special_tokens)[0]) for text in texts]
