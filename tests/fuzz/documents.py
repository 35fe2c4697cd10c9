"""Fuzzes YAML files: an error names the file, and accepted values are usable."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import BaseModel

from router.config.load import load, shipped
from router.config.models import ModelPrior
from router.config.policy_files import PolicyLibrary, check
from router.config.schema import RouterConfig
from router.errors import ConfigError
from router.policy.classes import ClassRules
from router.policy.decide import decide
from router.types import PodLoad, PodState, PodStatus
from tests.kit.scenes import holding, pod, scene

KINDS: tuple[type[BaseModel], ...] = (RouterConfig, ModelPrior, ClassRules)


@cache
def _folder() -> TemporaryDirectory[str]:
    """Deleted with the process."""
    return TemporaryDirectory(prefix="warmroute-fuzz-")


def _written(data: bytes) -> Path:
    file = Path(_folder().name, "mine.yaml")
    file.write_bytes(data)
    return file


def config(data: bytes) -> None:
    """router.yaml, a cost prior, or the rules of classes."""
    file = _written(data)
    for kind in KINDS:
        try:
            value = load(file, kind)
        except ConfigError as error:
            _check_names_file(error, file)
        else:
            assert kind.model_validate(value.model_dump(by_alias=True)) == value


def policies(data: bytes) -> None:
    """A policy; an accepted one decides, and its cost parts add up to its total."""
    file = _written(data)
    try:
        shelf = PolicyLibrary(file.parent)
        policy = shelf.policy("mine")
        check(shelf, "mine")
    except ConfigError as error:
        _check_names_file(error, file)
        return
    a, b, c = pod("a"), pod("b", zone="z"), pod("c", host="h", rack="r")
    statuses = [
        PodStatus(each, PodState.READY, PodLoad(3, waiting, 0.9, 1.0)) for waiting, each in enumerate((a, b, c))
    ]
    for candidate in decide(holding(scene(*statuses), "b", 20), policy).candidates:
        cost = candidate.cost
        assert abs(sum(cost.parts_ms) - cost.total_ms) <= 1e-6 * max(1.0, abs(cost.total_ms))


def _check_names_file(error: ConfigError, file: Path) -> None:
    assert str(error).startswith((f"{file}:", f"{shipped('policies')}")), error


POLICIES = (
    b"name: mine\nabout: x\nextends: least_load\ncosts:\n  decode: {weight: 0.5}\n  queue: null\n",
    b"name: mine\nabout: x\nmatch: {tenant: etl, prompt_tokens: {min: 5}}\npercent: 5\nfilters:\n"
    b"  max_waiting: {requests: 8}\ncosts: {prefill: {}, kv_pressure: {weight: 0.3}}\npicker:\n"
    b"  lowest_cost: {indifference_ms: 1.0}\nshortlist: 2\n",
    b"name: mine\nabout: >\n  two\n  lines\npicker: {ring_bounded_load: {}}\n",
    b"name: mine\nabout: &a x\npicker: {lowest_cost: {}}\nretry: {attempts: 2}\npd: {splits: false}\n"
    b"slo: {ttft_ms: 2}\n",
)
CONFIGS = (
    b"policy: x\nlimits:\n  retries: 2\nmodels:\n- name: m\n  tokenizer: package:p\n"
    b"  cost: {model: m, hardware: h100x1}\n",
    b"pods:\n- url: http://a:1\n  speed: {c0_ms: 1, c1_ms_per_token: 1, c2_ms_per_token2: 0}\n  kv_events: off\n"
    b"- {url: 'http://b', id: b, kv_events: {endpoint: 'tcp://b:1'}}\n"
    b"links: {cpu: {t0_ms: 1, gb_per_s: 3}, disk: nvme}\n",
    b"name: m\nkv_bytes_per_token: 1000\nhardware:\n"
    b"  h100x1: {c0_ms: -1.5, c1_ms_per_token: 1e-2, c2_ms_per_token2: 0, source: s}\n",
    b"a: &a [*a]\n",
    b"? [a, b]\n: 2001-12-14t21:59:43.10-05:00\nb: !!binary aGk=\nc: !!set {x}\n",
)
YAML_WORDS = (
    *(
        b": ",
        b"\n- ",
        b"\n  ",
        b"{",
        b"}",
        b"[",
        b"]",
        b"&a ",
        b"*a",
        b"<<: *a",
        b"!!str ",
        b"? ",
        b"| \n",
        b"'",
        b'"',
        b"#",
    ),
    *(
        b"null",
        b"~",
        b"off",
        b".inf",
        b".nan",
        b"1e400",
        b"0x1f",
        b"1_0",
        b"2001-12-14",
        b"---\n",
        b"%YAML 1.1\n",
        b"\t",
        b"\xff",
    ),
)
