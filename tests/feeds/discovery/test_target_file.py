"""The pods of a file, while the file changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from router.config.pod_schema import DiscoveredPods, TargetFile
from router.errors import ConfigError
from router.feeds.discovery.membership import ListedPod, SourceStatus
from router.feeds.discovery.target_file import MAX_FILE_BYTES, FilePods, read_targets
from router.types import Role
from tests.kit.deadlines import DEADLINE_S

TWO = "- targets: [10.0.0.7:8000, 10.0.0.8:8000]\n"
ONE = "- targets: [10.0.0.7:8000]\n"


def urls(pods: Sequence[ListedPod]) -> list[str]:
    return [pod.config.url for pod in pods]


def read(folder: Path, text: str, **pod: Any) -> Sequence[ListedPod]:
    file = folder / "targets.yaml"
    file.write_text(text)
    return read_targets(TargetFile(path=str(file), pod=DiscoveredPods(**pod)))


def test_an_entry_overrides_the_facts_of_the_configuration(tmp_path: Path) -> None:
    """Those that it does not name stay; `{host}` becomes the host of each pod."""
    text = """
- targets: [10.0.0.7:8000, "https://gate/pods/3", "[fd00::1]:8000"]
  role: prefill
  zone: b
  kv_events: {endpoint: "tcp://{host}:5557"}
- targets: [10.0.0.9:8000]
"""
    pods = [pod.config for pod in read(tmp_path, text, engine="sglang", zone="a")]
    assert [pod.url for pod in pods] == [
        "http://10.0.0.7:8000",
        "https://gate/pods/3",
        "http://[fd00::1]:8000",
        "http://10.0.0.9:8000",
    ]
    assert [pod.kv_events if isinstance(pod.kv_events, str) else pod.kv_events.endpoint for pod in pods] == [
        "tcp://10.0.0.7:5557",
        "tcp://gate:5557",
        "tcp://[fd00::1]:5557",
        "auto",
    ]
    assert {pod.engine for pod in pods} == {"sglang"}
    assert [(pod.zone, pod.role, pod.handoff) for pod in pods] == [("b", Role.PREFILL, "bootstrap")] * 3 + [
        ("a", Role.BOTH, "")
    ]


def test_labels_are_facts_that_fields_override(tmp_path: Path) -> None:
    """Names of fields, and those of charts; what others write for Prometheus is ignored."""
    text = """
- targets: [10.0.0.7:8000]
  labels: {job: vllm, role: decode, handoff-port: "9000", zone: b, rack: r, llm-d.ai/engine-type: sglang, ports: "1,2"}
  rack: s
- targets: [10.0.0.8:8000]
  labels: {llm-d.ai/role: encode}
"""
    (pod,) = (listed.config for listed in read(tmp_path, text, zone="a"))
    assert (pod.role, pod.engine, pod.handoff, pod.handoff_port) == (Role.DECODE, "sglang", "bootstrap", 9000)
    assert (pod.zone, pod.rack, pod.url) == ("a", "s", "http://10.0.0.7:8000")


def test_a_label_whose_value_no_pod_can_have_is_named(tmp_path: Path) -> None:
    """With the target."""
    with pytest.raises(ConfigError, match=r"http://a:1.*role"):
        read(tmp_path, '[{"targets": ["a:1"], "labels": {"role": "master"}}]')


def test_a_file_may_be_json(tmp_path: Path) -> None:
    """As written by programs."""
    assert urls(read(tmp_path, json.dumps([{"targets": ["a:1"], "dp_size": 2}]))) == ["http://a:1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- targets: [a:1]\n  rol: prefill\n", r"targets\.yaml:2: rol: unknown key; did you mean 'role'"),
        ("- targets: [a:1]\n- targets: [b]\n", r"targets\.yaml:2: targets\.0: needs HOST:PORT"),
        ("- targets: [a:1]\n- role: decode\n", r"targets\.yaml:2: targets: is required"),
        ("- targets: [a:1]\n  auth: {bearer_file: /etc/shadow}\n", r"targets\.yaml:2: auth: unknown key"),
        ("- targets: [a:1]\n  kv_events: {endpoint: 'tcp://b:1'}\n", r"kv_events: must contain \{host\}"),
        ("- targets: [a:1]\n  engine: llamacpp\n  role: prefill\n", "needs a handoff dialect"),
        ("- 3\n", r"targets\.yaml:1: \(top level\): must be a mapping"),
        ("targets: [a:1]\n", r"targets\.yaml:1: must be a list"),
        ("", r"must be a list .* write \[\] for no pods"),
        ("- targets: [a:1\n", r"targets\.yaml:\d: not valid YAML"),
        ("#" * (MAX_FILE_BYTES + 1), "larger than"),
    ],
)
def test_a_mistake_is_reported_with_file_line_and_key(tmp_path: Path, text: str, expected: str) -> None:
    """All pods of such a file are refused."""
    with pytest.raises(ConfigError, match=expected):
        read(tmp_path, text)


class Watched:
    """A source of a file that is checked without pauses."""

    def __init__(self, path: Path) -> None:
        self.status = SourceStatus("file")
        self.sleeps: list[float] = []
        self.on_sleep: Callable[[], object] = bool
        self._source = FilePods(TargetFile(path=str(path)), self.status, self._sleep)
        self.sets: AsyncGenerator[Sequence[ListedPod], None] = aiter(self._source)

    async def _sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.on_sleep()
        await asyncio.sleep(0)

    async def next(self) -> list[str]:
        async with asyncio.timeout(DEADLINE_S):
            return urls(await anext(self.sets))


@pytest.mark.anyio
async def test_a_replaced_file_is_read_again(tmp_path: Path) -> None:
    """Written in place, renamed over, and through the link of a mounted ConfigMap."""
    for version, text in (("1", ONE), ("2", TWO), ("3", ONE)):
        (tmp_path / version).mkdir()
        (tmp_path / version / "targets.yaml").write_text(text)
    link = tmp_path / "..data"
    link.symlink_to("1")
    file = tmp_path / "targets.yaml"
    file.symlink_to("..data/targets.yaml")
    watched = Watched(file)
    async with aclosing(watched.sets):
        assert len(await watched.next()) == 1
        new = tmp_path / "new"
        new.symlink_to("2")
        new.rename(link)
        assert len(await watched.next()) == 2
        new.symlink_to("3")
        new.rename(link)
        assert len(await watched.next()) == 1
        file.unlink()
        file.write_text(TWO)
        assert len(await watched.next()) == 2
        file.write_text("[]\n")
        assert await watched.next() == []


@pytest.mark.anyio
async def test_a_broken_or_missing_file_keeps_the_last_pods_and_is_logged_once(tmp_path: Path) -> None:
    """Its age grows until it is right again."""
    file = tmp_path / "targets.yaml"
    file.write_text(ONE)
    watched = Watched(file)
    async with aclosing(watched.sets):
        await watched.next()
        with capture_logs() as logs:
            file.write_text("- targets: [a\n")
            steps = iter([*([None] * 20), file.unlink, *([None] * 20), lambda: file.write_text(TWO)])
            watched.on_sleep = lambda: (next(steps, None) or bool)()
            assert len(await watched.next()) == 2
    assert [line["event"] for line in logs] == ["pod source unavailable; its last pods stay in use"] * 2 + [
        "pod source available again"
    ]
    assert "not valid YAML" in logs[0]["error"]
    assert "cannot be read" in logs[1]["error"]
    assert not watched.status.error


@pytest.mark.anyio
async def test_a_file_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    """Half of it could be valid."""
    file = tmp_path / "targets.yaml"
    file.write_text(ONE)
    watched = Watched(file)
    async with aclosing(watched.sets):
        await watched.next()
        texts = iter(["# started\n", "- targets: [b:1]\n# half\n", TWO])

        def write() -> None:
            if text := next(texts, ""):
                file.write_text(text)

        watched.on_sleep = write
        assert len(await watched.next()) == 2
