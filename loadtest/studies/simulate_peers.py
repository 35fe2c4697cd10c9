"""`warmroute simulate` with the published formulas of other routers, and with an HTML page of the results.

    python -m loadtest.studies.simulate_peers mixed --policies cost_aware,sglang_cache_aware --report report.html
    python -m loadtest.studies.simulate_peers mixed --compare --csv runs.csv --report report.html

Takes the arguments of `warmroute simulate`. `--policies all` are the shipped policies and the peers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from loadtest.commands.simulate import SimulateOptions, simulate
from loadtest.html_page import writable_report
from loadtest.simulated_peers.peer_pickers import policies_with_peers
from loadtest.studies.simulated_page import write_report
from router.cli.options import with_options
from router.errors import ConfigError


@dataclass(frozen=True)
class PageOptions(SimulateOptions):
    report: Annotated[
        Path | None, typer.Option(help="Write an HTML page with plots.", show_default="none", callback=writable_report)
    ] = None


@with_options(PageOptions)
def main(options: PageOptions) -> None:
    """Simulate traffic under policies, print a table and write a page. All times are virtual."""
    try:
        setup = replace(options.experiment(), policies=policies_with_peers())
        results = simulate(options, setup)
    except ConfigError as error:
        raise SystemExit(f"configuration: {error}") from error
    if options.report is not None:
        write_report(options.report, results, setup.fleet.model, setup.slo, options.traffic.name)


if __name__ == "__main__":
    typer.run(main)
