"""How the pods of a model identify pictures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.engines.adapter import parse_models
from router.engines.engine_catalog import picture_identities
from router.prompt.pictures.vllm_identifier import identify
from router.types import Pod
from tests.kit.scenes import make_pod, snapshot_of

POD = make_pod(models=("m",), adapters=("l",), weights="./w", reads_pictures=True)


@pytest.mark.parametrize("model", ["m", "l"])
def test_pods_with_the_same_weights_identify_pictures_alike(model: str) -> None:
    found = picture_identities(
        snapshot_of(POD, replace(POD, id="b"), replace(POD, id="c", models=("x",), adapters=())), model
    )
    assert found == (identify, "./w")


@pytest.mark.parametrize(
    "pods",
    [
        (),
        (replace(POD, weights=""),),
        (replace(POD, engine="sglang"),),
        (POD, replace(POD, id="b", weights="/other/w")),
        (POD, replace(POD, id="b", engine="sglang")),
    ],
)
def test_where_pods_differ_or_do_not_say_pictures_are_not_identified(pods: tuple[Pod, ...]) -> None:
    assert picture_identities(snapshot_of(*pods), "m") is None


def test_a_pod_that_has_not_passed_its_test_does_not_count() -> None:
    """Except for the test itself."""
    untested = replace(POD, id="b", weights="/other/w", reads_pictures=False)
    assert picture_identities(snapshot_of(POD, untested), "m") == (identify, "./w")
    assert picture_identities(snapshot_of(untested), "m") is None
    assert picture_identities(snapshot_of(untested), "m", proven=False) == (identify, "/other/w")


def test_the_weights_are_the_root_of_the_base_model() -> None:
    found = parse_models(b'{"data":[{"id":"l","root":"/l","parent":"m"},{"id":"m","root":"./w"}]}')
    assert found is not None and found.weights == "./w"
    unknown = parse_models(b'{"data":[{"id":"m"}]}')
    assert unknown is not None and unknown.weights == ""
