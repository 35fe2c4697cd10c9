"""Which pods does a configuration describe?

Configuration values in, `Pod` values out: one for each data-parallel rank, with the speed that its model and hardware
are known for. This file asks no pod anything.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from router.config.priors import prior_speed
from router.config.schema import CostPrior, ModelPrior, PodConfig, RouterConfig
from router.types import Pod, PodSpeed


def pods_of(pod: PodConfig, config: RouterConfig, priors: dict[str, ModelPrior]) -> list[Pod]:
    """The pods behind one URL. Raises `ConfigError` where its hardware has no prior."""
    name = pod.id or urlsplit(pod.url).netloc
    ranks: list[int | None] = [None] if pod.dp_size == 1 else list(range(pod.dp_size))
    speed = pod.speed or _speed(pod, config, priors)
    return [
        Pod(
            id=name if rank is None else f"{name}#{rank}",
            url=pod.url,
            engine=pod.engine,
            speed=speed,
            role=pod.role,
            dp_rank=rank,
            host=pod.host or urlsplit(pod.url).hostname or "",
            rack=pod.rack,
            zone=pod.zone,
        )
        for rank in ranks
    ]


def _speed(pod: PodConfig, config: RouterConfig, priors: dict[str, ModelPrior]) -> PodSpeed:
    """A fleet serves one model as a rule: the first configured one tells the speed before the pod has told its own."""
    cost = config.models[0].cost if config.models else CostPrior()
    return prior_speed(priors, cost, pod.hardware)
