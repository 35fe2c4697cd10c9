"""Which requests may go to a pod, and when? All at once, or by the router's own queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from pydantic import ConfigDict

from router.admission.admission_queue import AdmissionConfig
from router.admission.tenant import Tenant
from router.request.queues import QueueSettings


class Rule(StrEnum):
    """Which requests may go to a pod, and when."""

    NONE = "none"
    """All go at once, and wait in the engines."""
    QUEUE = "queue"
    """The router's own queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A rule, and who sends what. `tenants`: by the kind of a session; others belong to one tenant."""

    rule: Rule = Rule.NONE
    queue: AdmissionConfig = field(default_factory=AdmissionConfig)
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def queue_settings(self, routers: int) -> QueueSettings | None:
        """The queue of one of `routers` equal routers; None without one."""
        return QueueSettings(self.queue, lambda: routers) if self.rule is Rule.QUEUE else None
