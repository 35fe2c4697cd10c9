"""Which part of the configuration does carrying requests read?

Values for `proxy`, from a configuration that was checked. This file builds no owner.
"""

from __future__ import annotations

from router.config.schema import RouterConfig
from router.proxy.connection import UpstreamTimeouts
from router.proxy.forward import Forwarding


def timeouts_of(config: RouterConfig) -> UpstreamTimeouts:
    """How long pods may take."""
    limits = config.limits
    return UpstreamTimeouts(limits.connect_timeout_s, limits.first_byte_timeout_s, limits.idle_timeout_s)


def forwarding_of(config: RouterConfig) -> Forwarding:
    """Retries, headers, and what is believed of caches."""
    return Forwarding(
        retries=config.limits.retries,
        retry_budget=config.limits.retry_budget,
        route_headers=config.edge.route_headers,
        trust_engine_fields=config.edge.trust_engine_fields,
        predicted_ttl_s=config.index.predicted_ttl_s,
        no_events_ttl_s=config.index.no_events_ttl_s,
        no_events_capacity_tokens=config.index.no_events_capacity_tokens,
    )
