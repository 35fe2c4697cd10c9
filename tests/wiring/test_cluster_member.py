"""The router's part in the cluster."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from loadtest.simulator.router_view import Unrecorded
from router.config.index_schema import RedisIndex
from router.feeds.discovery.membership import Membership
from router.feeds.kv_redis import ReadableGenerations
from router.feeds.supervise import running
from router.fleet.fleet import Fleet
from router.fleet.ledger import Ledger
from router.policy.calibration import Calibration
from router.policy.calibrator import Calibrator
from router.types import Generation, Links, PodSpeed
from router.wiring.cluster_member import join_cluster
from tests.kit.deadlines import DEADLINE_S
from tests.redis_servers.server import free_port


def test_a_router_without_a_cluster_does_not_import_redis() -> None:
    """It saves 6 MiB and 50 ms."""
    code = "import sys, router.wiring.router; sys.exit('redis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_publisher_that_differs_is_logged_once() -> None:
    """The generations in Redis are checked every few seconds."""
    ours = Generation(model="demo", tokenizer="ours")
    is_readable = ReadableGenerations({"demo": ours})
    with capture_logs() as lines:
        for _ in range(3):
            assert not is_readable(Generation(model="demo", tokenizer="theirs"))
            assert not is_readable(Generation(model="another", tokenizer="ours"))
            assert is_readable(ours)
        assert not is_readable(Generation(model="demo", tokenizer="third"))
    assert [line["publisher"].split(",")[0] for line in lines] == ["theirs", "third"]


@pytest.mark.net
@pytest.mark.anyio
async def test_a_router_serves_at_once_while_redis_is_away() -> None:
    """`index.redis.ready_timeout_s` is for a Redis that answers; the log names the address and not the password."""
    port = free_port()
    redis = RedisIndex(url=SecretStr(f"redis://:hush@127.0.0.1:{port}"), ready_timeout_s=3600)
    fleet, calibrator = Fleet(), Calibrator(Calibration(), Unrecorded(), Links())
    pods = Membership(fleet, lambda *_: (PodSpeed(0, 0, 0), 0), {})
    member = join_cluster(redis, {}, Ledger(), calibrator, fleet, pods)
    with capture_logs() as lines:
        async with asyncio.timeout(DEADLINE_S), running(member.feeds):
            await member.wait(fleet, redis.ready_timeout_s, self_test=True)
    await member.close()
    assert not member.index.loaded.is_set()
    assert any(line["event"] == "serving before startup is complete" for line in lines)
    away = [line for line in lines if line["event"] == "Redis unavailable"]
    assert away and all(line["redis"] == f"127.0.0.1:{port}" and "index.redis" in line["hint"] for line in away)
    assert all(str(port) in line["error"] for line in away) and "hush" not in str(lines)
