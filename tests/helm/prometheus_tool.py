"""Runs promtool, Prometheus's own tool: `make promtool` fetches it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROMTOOL = shutil.which("promtool", path=str(Path(sys.executable).parent)) or shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is missing: make promtool")


def promtool(*arguments: str) -> None:
    """Run it; fails with its output unless it accepts what it checks."""
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
