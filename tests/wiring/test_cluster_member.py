"""The router's part in the cluster."""

from __future__ import annotations

import subprocess
import sys

from structlog.testing import capture_logs

from router.types import Generation
from router.wiring.cluster_member import ReadableGenerations


def test_a_router_without_a_cluster_does_not_import_redis() -> None:
    """It saves 6 MiB and 50 ms."""
    code = "import sys, router.wiring.program; sys.exit('redis' in sys.modules)"
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
    assert [line["publisher"][0] for line in lines] == ["theirs", "third"]
