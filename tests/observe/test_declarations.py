"""Every metric has one declaration, and every declaration is a metric."""

from __future__ import annotations

from collections import Counter

import pytest
from prometheus_client import CollectorRegistry, Metric

from helm.monitoring.metric_catalog import CHAPTERS, DECLARED, LABELS, declarations_of
from router.observe.declared import of_publisher
from router.observe.fast_metrics import Declaration
from router.observe.metrics import Metrics, add_process_metrics
from router.publisher.publisher_app import PublisherMetrics


def exposed() -> dict[str, list[Metric]]:
    """The families of a router and of a publisher."""
    router = Metrics().registry
    add_process_metrics(router)
    registries: dict[str, CollectorRegistry] = {"router": router, "publisher": PublisherMetrics().registry}
    return {program: list(registry.collect()) for program, registry in registries.items()}


def test_every_exposed_metric_is_declared_and_every_declared_one_is_exposed() -> None:
    """By a router, or by a publisher."""
    found = exposed()
    assert {family.name for families in found.values() for family in families} == DECLARED.keys()
    own = {one.name for one in declarations_of(of_publisher)}
    assert {family.name for family in found["router"]} == DECLARED.keys() - own
    assert own < {family.name for family in found["publisher"]}


def test_every_metric_has_its_declared_type() -> None:
    """The code chooses the class that counts."""
    types = {family.name: family.type for families in exposed().values() for family in families}
    assert types == {name: declared.kind for name, declared in DECLARED.items()}


def test_no_name_is_declared_twice() -> None:
    """A constant would replace the other in the catalog."""
    names = Counter(one.name for chapter in CHAPTERS for one in declarations_of(chapter))
    assert max(names.values()) == 1


@pytest.mark.parametrize("declared", DECLARED.values(), ids=lambda one: one.name)
def test_the_source_of_every_label_is_known(declared: Declaration) -> None:
    """So that an operator can say how many series there will be."""
    assert set(declared.labels) <= LABELS.keys()


def test_no_label_is_described_in_vain() -> None:
    """A label that no metric has."""
    assert {label for declared in DECLARED.values() for label in declared.labels} == LABELS.keys()
