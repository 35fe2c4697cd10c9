"""Which event loop the tests of this folder run on."""

from __future__ import annotations

from tests.kit.virtual_time import anyio_backend

__all__ = ["anyio_backend"]
