"""How much is kept of decisions is configured in one place."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from router.config.receipts import Receipts
from router.config.schema import RouterConfig


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("r.jsonl", Receipts(file="r.jsonl")),
        (None, Receipts()),
        ({"keep": 5, "prompts": True}, Receipts(keep=5, prompts=True)),
    ],
)
def test_a_file_alone_is_enough(said: object, meant: Receipts) -> None:
    """The short form, none, and the long one."""
    assert RouterConfig.model_validate({"receipts": said}).receipts == meant


@pytest.mark.parametrize(
    "wrong",
    [
        {"receipts": {"keeep": 5}},
        {"receipts": {"redis_maxlen": 10}},
    ],
)
def test_what_cannot_be_meant_is_refused(wrong: dict[str, object]) -> None:
    """An unknown key, a stream without a Redis."""
    with pytest.raises(ValidationError):
        RouterConfig.model_validate(wrong)
