"""preStop of an engine: the router sends nothing new to a pod that terminates; waits until its answers are complete."""

import re
import sys
import time
import urllib.request

PORT, SECONDS = sys.argv[1:3]
COUNT = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? ([0-9.e+]+)", re.MULTILINE)


def is_busy() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=5) as answer:
            return any(float(count) for count in COUNT.findall(answer.read().decode()))
    except OSError:
        return False


end = time.monotonic() + float(SECONDS)
time.sleep(5)  # until the router has seen it
while time.monotonic() < end and is_busy():
    time.sleep(1)
