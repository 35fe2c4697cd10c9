"""Token ids of completions, decoded in slices."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import MalformedRequest
from router.prompt import completion
from router.prompt.completion import CompletionPrompts, number_of_prompts

PROMPTS = CompletionPrompts(130_000)


@pytest.mark.parametrize("separator", [b",", b" , ", b"\n,"])
@pytest.mark.parametrize("slice_bytes", [16, 64, 1 << 16])
def test_slices_decode_to_the_whole_list(slice_bytes: int, separator: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "SLICE_BYTES", slice_bytes)
    numbers = random.Random(1)
    for count in range(1, 60):
        ids = [numbers.randrange(130_000) for _ in range(count)]
        raw = msgspec.Raw(b"[" + separator.join(b"%d" % token for token in ids) + b"]")
        assert PROMPTS.read(raw).tolist() == ids  # type: ignore[union-attr]


def test_no_slice_is_longer_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no call holds the interpreter for long."""
    decoded: list[int] = []

    class Recording:
        def decode(self, piece: bytes) -> list[int]:
            decoded.append(len(piece))
            return msgspec.json.decode(piece, type=list[int])

    prompts = CompletionPrompts(10)
    monkeypatch.setattr(prompts._ids, "_ids", Recording())
    assert len(prompts.read(msgspec.Raw(b"[" + b"7," * 500_000 + b"7]"))) == 500_001
    assert max(decoded) <= completion.SLICE_BYTES + 2
    assert len(decoded) == -(-1_000_001 // (completion.SLICE_BYTES - 1))


@pytest.mark.parametrize(
    "raw",
    [b"[1" + b" " * 200_000 + b"]", b"[1,[2]]", b'[1,"a"]', b"[1,130000]", b"[ ]", b"{}", b"[" + b"1" * 99_999 + b"]"],
)
def test_anything_else_is_malformed(raw: bytes) -> None:
    """A number that is longer than a slice, too."""
    with pytest.raises(MalformedRequest) as caught:
        PROMPTS.read(msgspec.Raw(raw))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("raw", "first"), [(b'"a"', "a"), (b'["a", "b"]', "a"), (b"[[1, 2], [3]]", [1, 2]), (b"[ [1], [] ]", [1])]
)
def test_of_several_prompts_the_first_counts(raw: bytes, first: str | list[int]) -> None:
    found = PROMPTS.read(msgspec.Raw(raw))
    assert (found if isinstance(found, str) else found.tolist()) == first


@given(st.lists(st.text('a"\\\\[]{},: \u00e9\n'), min_size=1) | st.lists(st.lists(st.integers(0, 9)), min_size=1))
def test_prompts_of_a_batch_are_counted_without_being_decoded(prompts: list[Any]) -> None:
    raw = msgspec.Raw(json.dumps(prompts).encode())
    assert number_of_prompts(raw) == len(prompts)
    assert number_of_prompts(msgspec.Raw(json.dumps(prompts[0]).encode())) == 1
