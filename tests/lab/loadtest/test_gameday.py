"""The game day names alerts that exist."""

from __future__ import annotations

from helm.monitoring.alerts import ALERTS
from loadtest.faults.gameday import INCIDENTS


def test_every_incident_names_an_alert_of_the_chart() -> None:
    assert {one.alert for one in INCIDENTS.values()} <= {alert.name for alert in ALERTS}
    assert len(INCIDENTS) == 7
