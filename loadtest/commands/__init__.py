"""The commands of the laboratory, which the entry point `warmroute.commands` adds to those of the router."""

from __future__ import annotations

COMMANDS = {
    "demo": ("loadtest.commands.demo:demo_command", "Compare three policies on a fleet of mock engines."),
    "simulate": ("loadtest.commands.simulate:simulate_command", "Compare policies on a simulated fleet."),
    "compare": (
        "loadtest.commands.compare:compare_command",
        "Does it pay on recorded traffic? Simulate policies on it.",
    ),
    "plan": ("loadtest.commands.simulate:plan_command", "Estimate how many pods a load needs for an SLO."),
    "mock-engine": ("loadtest.commands.mock_engine_command:mock_engine_command", "Run mock engines."),
    "prior": ("loadtest.commands.prior:prior_command", "Print a cost prior for a model, from its config.json."),
}
