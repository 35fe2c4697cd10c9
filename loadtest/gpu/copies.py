"""Measures copies between host and GPU memory, as a CPU tier makes them: pinned memory, one copy at a time."""

from __future__ import annotations

import json
import os
import platform
import time
from statistics import median
from typing import Any

SIZES_BYTES = tuple(1 << power for power in (16, 18, 20, 22, 24, 26, 28, 30))
REPEATS = 7


def copies() -> list[dict[str, Any]]:
    """Median milliseconds by direction and bytes; empty without a GPU."""
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    host = torch.empty(max(SIZES_BYTES), dtype=torch.uint8, pin_memory=True)
    device = torch.empty(max(SIZES_BYTES), dtype=torch.uint8, device="cuda")
    found = []
    for direction, target, source in (("to_gpu", device, host), ("to_host", host, device)):
        for size in SIZES_BYTES:
            times = []
            for _ in range(REPEATS + 1):
                torch.cuda.synchronize()
                began_s = time.perf_counter()
                target[:size].copy_(source[:size], non_blocking=True)
                torch.cuda.synchronize()
                times.append((time.perf_counter() - began_s) * 1000)
            found.append({"direction": direction, "bytes": size, "ms": median(times[1:])})
    return found


def machine() -> dict[str, Any]:
    """What was measured, for the title of every table."""
    found: dict[str, Any] = {"cpus": os.cpu_count(), "python": platform.python_version()}
    try:
        import torch
    except ImportError:
        return found
    found["torch"] = torch.__version__
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return found


if __name__ == "__main__":
    print(json.dumps({"machine": machine(), "copies": copies()}))
