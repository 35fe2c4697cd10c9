"""What can be typed?

    warmroute serve         the router
    warmroute publish       beside a cache tier: its blocks into the cluster's index
    warmroute index ...     look into the cluster's index
    warmroute demo          a fleet of mock engines, three policies, one table
    warmroute simulate      a fleet under a virtual clock: policies side by side
    warmroute plan          how many pods for an SLO, and what saves some
    warmroute explain       why a request went where it went
    warmroute replay        recorded requests decided again, by another policy
    warmroute mock-engine   engine stand-ins on their own
    warmroute prior         what a model's KV and prefill are expected to cost, from its config.json
    warmroute config ...    check a configuration, show its defaults
    warmroute policies      which policies there are
    warmroute policy ...    check, compare, simulate and explain them

This file only names commands; each has its file.
"""

from __future__ import annotations

import sys

import typer

from router.cli.demo import demo_command
from router.cli.explain import explain_command
from router.cli.index import index_app
from router.cli.inspect import check_command, policies_command, show_command
from router.cli.mock_engine_command import mock_engine_command
from router.cli.plan import plan_command
from router.cli.policy import policy_app
from router.cli.prior import prior_command
from router.cli.publish import publish_command
from router.cli.replay import replay_command
from router.cli.serve import serve_command
from router.cli.simulate import simulate_command
from router.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Prefix-aware router."
)
app.command("serve", help="Run the router.")(serve_command)
app.command("publish", help="Publish which blocks a cache tier holds into the cluster's index.")(publish_command)
app.command("demo", help="Watch three policies route a realistic mix over mock engines.")(demo_command)
app.command("simulate", help="Play traffic against a simulated fleet; compare policies.")(simulate_command)
app.command("plan", help="How many pods this traffic needs for an SLO, and what saves some.")(plan_command)
app.command("explain", help="Why did a request go where it went? Ask a running router.")(explain_command)
app.command("replay", help="Decide recorded requests again, by another policy.")(replay_command)
app.command("mock-engine", help="Run engine stand-ins.")(mock_engine_command)
app.command("prior", help="Print a file of config/models for a model, from its config.json.")(prior_command)
app.command("policies", help="List the policies.")(policies_command)

config_app = typer.Typer(no_args_is_help=True, help="Check and show configuration.")
config_app.command("check", help="Read a configuration and all policies; say what is wrong, with file and line.")(
    check_command
)
config_app.command("show", help="Print the annotated defaults.")(show_command)
app.add_typer(config_app, name="config")
app.add_typer(index_app, name="index")
app.add_typer(policy_app, name="policy")


def main() -> None:
    """Entry point: a wrong configuration is a message and exit code 2, never a traceback."""
    try:
        app()
    except ConfigError as error:
        print(f"configuration: {error}", file=sys.stderr)
        sys.exit(2)
