"""What do Mooncake's connectors miss in a vLLM for CPU?

They ask for an accelerator's number and record events of one. A plugin of vLLM's (`vllm.general_plugins`), which
`install.sh` puts into an environment of its own: vLLM loads it in each of its processes. Host memory is written when
a step has ended, so that there is nothing to wait for. Never for the router.
"""

from __future__ import annotations

import torch


class Event:
    """One that has always happened."""

    def record(self, *_: object) -> None:
        """Everything up to here is done already."""

    def synchronize(self) -> None:
        """At once."""

    def query(self) -> bool:
        """It has."""
        return True


def register() -> None:
    """Answer for the accelerator that is not there."""
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.Event = Event
