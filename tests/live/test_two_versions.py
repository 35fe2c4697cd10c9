"""The router of an older commit and this one serve side by side with one Redis, as during an upgrade."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from loadtest.bench.checkout import HERE, Checkout
from loadtest.bench.cpu_ratio import older
from loadtest.commands.child_processes import FleetPlan, free_port, router_config
from tests.redis_process import redis_process

pytestmark = [pytest.mark.live, pytest.mark.net]

OLDER = "41c7321"
PLAN = FleetPlan(pods=2, num_blocks=2560)
BOOK = "The tide comes in twice a day, and the harbour master writes it down. " * 40
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def before() -> Checkout:
    return older(OLDER)


@contextmanager
def program(checkout: Checkout, folder: Path, name: str, *arguments: str) -> Iterator[Path]:
    """Run `warmroute` of a checkout; yields its log."""
    log = folder / f"{name}.log"
    command = [str(checkout.python), "-m", "router.cli", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | checkout.variables, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield log
    finally:
        process.terminate()
        process.wait(30)


def until(found: Any, what: str) -> Any:
    """Poll until it returns something that is true; errors of connections count as false."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            if value := found():
                return value
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError(what)


class Side:
    """A router of one version, and a publisher of it."""

    def __init__(self, checkout: Checkout, folder: Path, name: str, config: dict[str, Any]) -> None:
        self.checkout, self.folder, self.name = checkout, folder, name
        self._file = folder / f"{name}.json"
        self._file.write_text(json.dumps(config))
        self.port, admin_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.admin = f"http://127.0.0.1:{admin_port}" if checkout.has_admin_port else self.url
        self._options = ["--admin-port", str(admin_port)] if checkout.has_admin_port else []

    @contextmanager
    def serving(self) -> Iterator[Path]:
        """Run its router until both pods are trusted."""
        arguments = ["serve", "--config", str(self._file), "--port", str(self.port), *self._options]
        with program(self.checkout, self.folder, f"{self.name}-router", *arguments) as log:
            until(self._trusts_both, f"{self.name} does not trust both pods\n{log.read_text()[-3000:]}")
            yield log

    def _trusts_both(self) -> bool:
        pods = httpx.get(f"{self.admin}/admin/pods").json()
        return len(pods) == PLAN.pods and all(pod["trust"] == "trusted" for pod in pods)

    @contextmanager
    def publishing(self) -> Iterator[Path]:
        """Run its publisher until it is ready."""
        port = free_port()
        arguments = ["publish", "--config", str(self._file), "--port", str(port)]
        with program(self.checkout, self.folder, f"{self.name}-publisher", *arguments) as log:
            until(lambda: httpx.get(f"http://127.0.0.1:{port}/readyz").is_success, log.read_text()[-3000:])
            yield log

    def chat(self, about: str) -> httpx.Response:
        body = {"model": PLAN.model, "messages": [{"role": "user", "content": about + BOOK}], "max_tokens": 4}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=TIMEOUT_S).raise_for_status()

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.admin}/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.fixture(scope="module")
def sides(before: Checkout) -> Iterator[tuple[Side, Side]]:
    """The older router and this one, in front of the same two engines."""
    with TemporaryDirectory(prefix="warmroute-versions-") as name, ExitStack() as stack:
        folder, engines = Path(name), ["mock-engine", "--count", str(PLAN.pods), "--port", "0"]
        options = ["--model", PLAN.model, "--num-blocks", str(PLAN.num_blocks), "--time-scale", "0.1"]
        log = stack.enter_context(program(HERE, folder, "engines", *engines, *options))
        until(lambda: len(log.read_text().splitlines()) >= PLAN.pods, log.read_text())
        pods = [json.loads(line)["url"] for line in log.read_text().splitlines() if line.startswith("{")]
        redis = stack.enter_context(redis_process("valkey"))
        config = router_config(pods, PLAN) | {"index": {"redis": {"url": redis.url}}}
        both = Side(before, folder, "older", config), Side(HERE, folder, "this", config)
        for side in both:
            stack.enter_context(side.serving())
        yield both


def test_both_serve_and_know_of_each_other(sides: tuple[Side, Side]) -> None:
    """Each counts the other as a router that sends to the same pods."""
    for side in sides:
        assert side.chat("Hello. ").json()["choices"]
        until(lambda side=side: side.metric("warmroute_other_replicas") == 1.0, f"{side.name} is alone")


@pytest.mark.parametrize("publisher", [0, 1], ids=["older publisher", "this publisher"])
def test_each_finds_what_the_other_sent(sides: tuple[Side, Side], publisher: int) -> None:
    """By the index in Redis, which a publisher of either version writes."""
    with sides[publisher].publishing() as log:
        for first, second in (sides, sides[::-1]):
            topics = (f"{first.name}, {publisher}, {number}. " for number in count())

            def found(first: Side = first, second: Side = second, topics: Iterator[str] = topics) -> bool:
                """Whether the second router knows at once what the first one sent: a topic is asked once at each."""
                about = next(topics)
                pod = first.chat(about).headers["x-warmroute-pod"]
                headers = second.chat(about).headers
                return int(headers["x-warmroute-cached-tokens"]) > 500 and headers["x-warmroute-pod"] == pod

            until(found, f"{second.name} does not find what {first.name} sent")
        assert '"level": "error"' not in log.read_text()


def test_no_errors_are_logged(sides: tuple[Side, Side]) -> None:
    """By either router, all the time."""
    for side in sides:
        lines = (side.folder / f"{side.name}-router.log").read_text().splitlines()
        assert not [line for line in lines if "error" in line.lower() and "errors" not in line], side.name
