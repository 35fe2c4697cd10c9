"""The key `admission` of `config/router.yaml`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from router.admission.admission_queue import QueueLimits
from router.admission.tenant import Slo
from router.config.load import Strict


class SloConfig(Strict):
    """Times that a good request meets."""

    ttft_ms: PositiveFloat = 2000.0
    """To the first token."""
    idle_prefills: NonNegativeFloat = 3.0
    """The first token of a long prompt may take that many times its prefill on an idle pod."""
    tpot_ms: PositiveFloat = 100.0
    """Per token after the first. Of all clients: it limits the prompts of a pod."""


class AdmissionConfig(Strict):
    """The queue in front of the fleet. While no pod has a place for it, a request waits in the router and not in an
    engine; a request that would be late is refused at once, with 503, or with 429 if its tenant has used its share."""

    slo: SloConfig = SloConfig()
    """For clients whose tenant has none."""
    max_requests: PositiveInt = 1000
    """Waiting requests of one model. Beyond that, the tenant with the most waiting prefill loses its
    last one."""
    max_bytes: PositiveInt = 256 * 1024 * 1024
    """Their bodies."""
    max_wait_ms: PositiveFloat = 1200.0
    """The longest wait that is predicted for a request that is not refused."""
    slo_share: Annotated[float, Field(ge=0.5, le=0.999)] = 0.975
    """The share of the accepted requests that shall meet the SLO; a larger one refuses more. How much later than
    predicted a first token may come, and how long a pod only decodes between two prompts, is learnt for it."""

    @property
    def default_slo(self) -> Slo:
        return Slo(self.slo.ttft_ms, self.slo.tpot_ms, self.slo.idle_prefills)

    @property
    def limits(self) -> QueueLimits:
        return QueueLimits(
            max_requests=self.max_requests,
            max_bytes=self.max_bytes,
            max_wait_ms=self.max_wait_ms,
            slo_share=self.slo_share,
        )
