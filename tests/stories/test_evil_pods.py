"""A pod that reports nonsense, or too much, harms nobody but itself."""

from __future__ import annotations

import pytest

from loadtest.mock_engine import mock_responses
from router.engines.prometheus import METRICS
from tests.stories.conftest import Deploy
from tests.stories.test_first_light import opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]

UNQUOTED = b'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_waiting{' + b"a" * 60_000 + b"} 1\n"
WAITING = b"".join(b'vllm:num_requests_waiting{engine="%d"} 1e308\n' % rank for rank in range(4))
ENORMOUS = b"#" * METRICS.max_bytes
WHOLE_PAGES = {"metrics_filter": "ignored"}
"""A pod that filters its metrics would send little."""


@pytest.fixture
def first_pod_reports(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the metrics of the first pod that is asked begin with; empty for nothing."""
    prefix, asked = list[bytes](), list[object]()
    real = mock_responses.metrics_body

    def evil(config: object, pod: object, *more: object) -> bytes:
        asked.append(pod)
        body: bytes = real(config, pod, *more)  # type: ignore[arg-type]
        return b"".join(prefix) + body if pod is asked[0] else body

    monkeypatch.setattr(mock_responses, "metrics_body", evil)
    return prefix


async def test_every_chat_is_served(deploy: Deploy, first_pod_reports: list[bytes]) -> None:
    """The only pod serves it, with any report."""
    async with deploy(pods=1, engine=WHOLE_PAGES) as deployment:
        for page in (WAITING, UNQUOTED, ENORMOUS):
            first_pod_reports[:] = [page]  # once the pod is trusted: an ejected one would not become so
            for number in range(3):
                assert (await deployment.chat(opening(f"evil {number}"))).status_code == 200
