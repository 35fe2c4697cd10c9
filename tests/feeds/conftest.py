"""What tests of feeds have: a network of fake pods."""

from __future__ import annotations

import pytest

from tests.kit.fake_pods import Network


@pytest.fixture
def network() -> Network:
    """An empty network."""
    return Network()
