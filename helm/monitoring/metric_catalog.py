"""All metrics of routers and publishers, by chapter and by name, and what the values of their labels are."""

from __future__ import annotations

from types import ModuleType

from helm.monitoring import process_families
from router.observe.declared import of_decisions, of_pods, of_pools, of_process, of_publisher, of_requests
from router.observe.fast_metrics import Declaration

CHAPTERS: tuple[ModuleType, ...] = (
    of_requests,
    of_decisions,
    of_pods,
    of_pools,
    of_process,
    process_families,
    of_publisher,
)


def declarations_of(chapter: ModuleType) -> list[Declaration]:
    """The metrics of one chapter, in the order of the file."""
    return [one for one in vars(chapter).values() if isinstance(one, Declaration)]


DECLARED = {one.name: one for chapter in CHAPTERS for one in declarations_of(chapter)}
"""By name of the family."""

LABELS = {
    "by": "`prior` or `learnt`",
    "cause": "Causes of broken streams that `request/continuation/` distinguishes",
    "class": "Workload classes of the configuration; empty where a request ended before it was classified",
    "coefficient": "Coefficients of the cost model",
    "dialect": "Handoff dialects of the router",
    "engine": "Engines of the router",
    "endpoint": "OpenAI endpoints that the router distinguishes; `other` for the rest",
    "holder": "Pods and stores in the shared index",
    "kind": "`prompt`, `cached`, `computed` or `output`",
    "limit": "`requests`, `prompt`, `output`, `concurrent` or `money`",
    "link": "Kinds of links between pods",
    "met": "`true` or `false`",
    "matching": "`events`, `predicted`, `no_events` or `off`",
    "model": "Models of the configuration and of pods; empty where a request names none of them",
    "name": "Names of the file of names",
    "phase": "The seven phases of a request",
    "pod": "Pods of the fleet; a pod's series leave with it",
    "placement": "`chosen`: where requests were sent; `round_robin`: to all pods in turn; or `least_load`: to the pod"
    " with the fewest outstanding prompt tokens",
    "plan": "`direct`, `pull` or `split`",
    "policy": "Policies of the configuration; empty where a request ended before it was decided",
    "pool": "Pools of pods: `pool` in the configuration, or the label `warmroute.dev/pool`",
    "provider": "Providers of the configuration",
    "python_version": "Version of Python",
    "reason": "Codes of the router",
    "resource": "`prefill`, `kv_cache` or `decode_steps`",
    "method": "How streams are continued: `ids`, `replay`, `retry`, `finish`; `none`",
    "outcome": "`joined`, `left`, `differs`, `failed`, or why a stream was not continued",
    "result": "`ok` or a code of the router; of compared prompts `equal` or `differs`",
    "role": "`both`, `prefill` or `decode`",
    "rule": "Rules of chats that engines may read otherwise, and `plain`",
    "set_version": "Digest of all policies",
    "source": "Discovery sources of the configuration",
    "stage": "`all`, `available`, `captured` or `delivered`",
    "state": "All states of a pod or holder",
    "subject": "Classes of pods (model/engine/hardware) and kinds of links",
    "tenant": "The 20 busiest tenants, and `other`",
    "tokens": "`computed`, or `again`: those of them that a decode pod held",
    "tier": "`gpu`, `cpu`, `disk`, `remote`; `peer` for what is pulled from another pod",
    "trust": "All results of a self-test",
    "version": "Digest of a policy, or version of a program",
}
"""Where the values of each label come from. All are bounded: clients choose the names of tenants only."""
