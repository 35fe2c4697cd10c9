"""Makes Mooncake's connectors work in a vLLM for CPU.

They query an accelerator's id and record its events. This is a vLLM plugin (`vllm.general_plugins`) that `install.sh`
puts into its own environment; vLLM loads it in each process. Host memory is written when a step ends, so there is
nothing to wait for. Not used by the router.
"""

from __future__ import annotations

import torch


class Event:
    """An event that has always happened."""

    def record(self, *_: object) -> None:
        """No-op: everything before it is done."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Always true."""
        return True


def register() -> None:
    """Replace the accelerator functions."""
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.Event = Event
