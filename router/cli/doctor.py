"""`warmroute doctor`: whether each part of a deployment works, and what to do where one does not.

One table of checks. `config check --probe` runs those of what the configuration names. Pods are watched by the feeds of
`serve` until they are tested; nothing is changed. Each check takes at most `CHECK_S`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias

import httpx
import msgspec
import typer
from redis.exceptions import NoPermissionError, RedisError
from structlog.testing import capture_logs

from router.addresses import join_address
from router.cli.admin_client import DEFAULT_URL, AdminClient, BearerOption, JsonOption, UrlOption
from router.cli.config_check import check_router
from router.cli.options import PoliciesOption, flag
from router.cli.terminal import printable
from router.config.load import ENGINE_TOKENIZER, shipped
from router.config.mistakes import nearest
from router.config.models import PodPriors, all_priors
from router.config.names_file import read_names
from router.config.pod_keys import file_key
from router.config.schema import RouterConfig
from router.config.tenant_file import TenantFile
from router.config.tokenizer_files import is_local, load_tokenizer
from router.engines.engine_catalog import ENGINES
from router.engines.providers import PROVIDER_APIS
from router.errors import DECODE_ERRORS, ConfigError, UpstreamBroken, UpstreamError
from router.feeds.answers_test import missing_answers
from router.feeds.supervise import running, wait_until
from router.feeds.watch import Watch
from router.fleet.fleet import Fleet
from router.frontends.http.upstream import UpstreamPools
from router.observe.metrics import Metrics
from router.observe.tracing import collector_hint
from router.stores.index_reader import IndexReader
from router.stores.redis_connection import connect, redis_error_text
from router.stores.redis_schema import VERSION, Keys
from router.types import PodState, PodStatus
from router.wiring.fleet import FleetParts, build_fleet, build_prompts
from router.wiring.router import build_tracing

CHECK_S, PODS_S, CLIENT_S, MAX_SKEW_S = 60.0, 45.0, 5.0, 5.0
MORE = "Pods, Redis, publishers, tokenizers, collector, keys and clock: `warmroute doctor --config router.yaml`."
_OF_ANSWERS = "test of answers"
_TESTS = ("probe", "self-test", "test of conversions", "test of rules", "test of pictures", _OF_ANSWERS)
"""The checks of pods that are run."""


REFUSED = (401, 403)


class _ListedModel(msgspec.Struct):
    id: str


class _Listed(msgspec.Struct):
    """What a provider answers at `/v1/models`."""

    data: list[_ListedModel]


class Finding(NamedTuple):
    """One line: `level` is ok, warn or fail; `text` says what was found and, unless all is well, what to do."""

    level: str
    about: str
    text: str


@dataclass(frozen=True, slots=True)
class Subject:
    """What is checked. `skipped`: models whose tokenizers are not loaded, because they come from the hub."""

    config: RouterConfig
    parts: FleetParts
    admin: AdminClient
    skipped: frozenset[str] = frozenset()


Findings: TypeAlias = AsyncIterator[Finding]


async def _pods(it: Subject) -> Findings:
    fleet, cluster, served = it.parts.fleet, it.parts.cluster, set[str]()

    def is_known(status: PodStatus) -> bool:
        is_tested = fleet.trust_reason(status.pod.id) or not it.config.probes.self_test
        if status.pod.keeps_answers is None and any(check.due(status) for check in of_answers):
            return False
        return bool(fleet.state_reason(status.pod.id) or (status.state is PodState.READY and is_tested))

    def are_known() -> bool:
        is_read = cluster is None or cluster.index.loaded.is_set() or cluster.index.error
        is_listed = fleet.snapshot.pods or failing() or not (it.config.pods or it.parts.sources.statuses)
        return bool(is_read and is_listed and all(map(is_known, fleet.snapshot.pods)))

    def failing() -> list[str]:
        return [f"{one.source}: {one.error}" for one in it.parts.sources.statuses if one.error]

    table = [[check for check in lane if check.name in _TESTS] for lane in it.parts.checks]
    of_answers = [check for lane in table for check in lane if check.name == _OF_ANSWERS]
    index = {"index": cluster.feeds["index"]} if cluster else {}
    async with running({**it.parts.membership.feeds, **index, "checks of pods": Watch(fleet, table).run}):
        await wait_until(are_known, PODS_S)
        worth = await _answers_by_router(it.admin)
        for status in fleet.snapshot.pods:
            served.update(status.pod.models, status.pod.adapters)
            yield _pod(it, status, worth)
    for error in failing() or ([] if fleet.snapshot.pods else ["none is found; name them under `pods` or `discovery`"]):
        yield Finding("fail", "pods", error)
    for finding in _unserved_names(it.config, served):
        yield finding
    for model in it.config.models:
        if model.tokenizer and not model.is_pattern and model.name not in it.skipped:
            text = "the pods tokenize" if model.tokenizer == ENGINE_TOKENIZER else "loads"
            yield Finding("ok", f"tokenizer of {model.name}", text)
        if served and not model.is_pattern and model.name not in served:
            step = nearest(model.name, served) or "; correct the name, start a pod of it, or remove it from `models`"
            yield Finding("warn", f"model {model.name}", f"no pod serves it{step}")


def _unserved_names(config: RouterConfig, served: Collection[str]) -> Iterator[Finding]:
    """Targets of `names` that nobody serves: requests for them get 503."""
    others = {one.name for one in config.providers}
    known = {*served, *others, *(model.name for model in config.models)}  # of models there is a finding
    if config.names and served:
        for target in sorted(read_names(Path(config.names), others).targets - known):
            step = nearest(target, known) or "; correct it, or start a pod of it"
            yield Finding("warn", f"names: {target}", f"a target that no pod serves{step}")


async def _answers_by_router(admin: AdminClient) -> Mapping[str, str]:
    """By pod, what the running router says of answers, with what they are worth on its traffic; nothing without one."""
    try:
        async with admin.open_async() as http:
            return {row["id"]: row.get("answers", "") for row in (await http.get("/admin/pods")).json()}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError):
        return {}


def _pod(it: Subject, status: PodStatus, worth: Mapping[str, str]) -> Finding:
    """What the pod serves and how its prompts are matched, or why it cannot be used."""
    pod, about = status.pod, f"pod {status.pod.id}"
    if status.state is not PodState.READY:
        level = "warn" if status.state is PodState.DRAINING else "fail"
        return Finding(level, about, it.parts.fleet.state_reason(pod.id) or f"{status.state.value}: it does not answer")
    matching, why = it.parts.matching.of(pod)
    if it.skipped.intersection(pod.models):
        why = "not compared: its tokenizer comes from the hub; run this without --offline"
    engine = " ".join(filter(None, (pod.engine, pod.version, pod.front_end and f"({pod.front_end})")))
    serves = f"ready, {engine}, serves {', '.join(pod.models)}"
    answers = (worth.get(pod.id) or missing) if (missing := missing_answers(pod)) else ""
    found = f"{serves}; matching {matching.value}{why and f': {why}'}{answers and f'; {answers}'}"
    return Finding("warn" if why or answers else "ok", about, found)


async def _redis(it: Subject) -> Findings:
    redis = it.config.index.redis
    if redis is None:
        yield Finding("ok", "Redis", "not used: this router shares no index")
        return
    connection, version = connect(redis), "unknown"
    about, reader = f"Redis {connection.nodes}", IndexReader(connection, Keys(redis.namespace))
    try:
        with suppress(NoPermissionError):
            version = (await connection.client.info("server")).get("redis_version", version)
        began_s = time.perf_counter()
        await connection.client.ping()
        answers = f"version {version}, answers in {(time.perf_counter() - began_s) * 1000:.1f} ms"
        yield Finding("ok", about, f"{answers}; schema {VERSION}, namespace {redis.namespace}")
        rows = [(each.model, row) for each in await reader.generations() for row in (await reader.rows(each)).values()]
        for model, row in rows:
            state = f"{sum(row.blocks):,} blocks of {model}, last seen {max(time.time() - row.beat_s, 0):.0f} s ago"
            lost = "" if row.complete else "; events were lost: its cache is known in full when its engine restarts"
            yield Finding("warn" if lost else "ok", f"publisher of {row.facts.url or row.facts.source}", state + lost)
        if not rows:
            yield Finding("warn", "publishers", "none is in Redis; run `warmroute publish` for each pod")
    except (RedisError, OSError) as error:
        yield Finding("fail", about, f"{redis_error_text(error)}; start it, or correct index.redis")
    finally:
        await connection.close()


async def _providers(it: Subject) -> Findings:
    """Each is asked for its models, which costs nothing."""
    for one in it.config.providers:
        path = "/v1/models?limit=1000" if one.api == "anthropic" else "/v1/models"
        headers = PROVIDER_APIS[one.api].headers_with(file_key(one.key_file))
        pool, level = it.parts.pools.add(one.pod, it.config.limits), "warn"
        try:
            listed = msgspec.json.decode(await pool.fetch(path, CLIENT_S, more=headers), type=_Listed)
            known = {model.id for model in listed.data}
            text = f"takes its key, but does not list the model {one.model!r}{nearest(one.model, known)}"
            if one.model in known:
                level, text = "ok", f"takes its key, has {one.model}"
        except UpstreamError as error:
            is_refused = isinstance(error, UpstreamBroken) and error.status in REFUSED
            why = f"; correct the key in {one.key_file}" if is_refused else ""
            level, text = "fail", str(error).removeprefix(f"pod {one.pod.id}: ") + why
        except DECODE_ERRORS:
            text = "takes its key, but its list of models cannot be read"
        yield Finding(level, f"provider {one.name}", text)


async def _collector(it: Subject) -> Findings:
    """Sends an empty list of spans."""
    if (tracing := build_tracing(it.config.tracing)) is None:
        yield Finding("ok", "collector", "not used: tracing is off")
        return
    endpoint, kind = tracing.sink.endpoint, {"content-type": "application/x-protobuf"}
    try:
        async with httpx.AsyncClient(timeout=CLIENT_S) as client:
            answer = await client.post(endpoint, headers=kind)
        wrong = "" if answer.is_success else f"{answer.status_code} {answer.reason_phrase}"
    except httpx.HTTPError as error:
        wrong = str(error) or "no response"
    await tracing.sink.close()
    text = f"{wrong}; {collector_hint(endpoint)}" if wrong else "accepts spans"
    yield Finding("fail" if wrong else "ok", f"collector {endpoint}", text)


async def _clock(it: Subject) -> Findings:
    """By the header `date` of the first pod that answers."""
    async with httpx.AsyncClient(timeout=CLIENT_S, trust_env=False) as http:
        for status in it.parts.fleet.snapshot.pods:
            try:
                async with http.stream("GET", f"{status.pod.url}{ENGINES[status.pod.engine].health_path}") as answer:
                    skew_s = time.time() - parsedate_to_datetime(answer.headers["date"]).timestamp()
            except (httpx.HTTPError, LookupError, ValueError):
                continue
            wrong = "" if abs(skew_s) <= MAX_SKEW_S else "; correct the wrong one, for example by NTP"
            text = f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} that of pod {status.pod.id}{wrong}"
            yield Finding("warn" if wrong else "ok", "clock", text)
            return
    yield Finding("ok", "clock", "not compared: no pod says its time")


async def _router(it: Subject) -> Findings:
    about = f"router {it.admin.url}"
    try:
        async with it.admin.open_async() as http:
            ready, metrics = await http.get("/readyz"), await http.get("/metrics")
            if not metrics.is_success:
                yield Finding("fail", about, f"{metrics.status_code}; name a file with its token: --bearer-file")
                return
            version = metrics.text.partition("warmroute_build_info{")[2].partition("}")[0]
            state = ready.json().get("status", "unknown") if ready.content else ready.reason_phrase
            yield Finding("ok" if ready.is_success else "fail", about, f"{state}; {version}")
            async with http.stream("GET", "/ui/events") as events:
                snapshot = await anext(line async for line in events.aiter_lines() if line.startswith("data: "))
            for notice in json.loads(snapshot[6:])["notices"]:
                yield Finding("warn", about, notice["text"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, StopAsyncIteration) as error:
        start = "start `warmroute serve`, or name its admin listener: --url"
        yield Finding("warn" if it.config.pods else "fail", about, f"{error}; {start}")


PROBES: Mapping[str, Callable[[Subject], Findings]] = {
    "tokenizers and pods": _pods,
    "Redis and publishers": _redis,
    "providers": _providers,
    "the collector of traces": _collector,
}
"""The checks of what the configuration names."""
CHECKS = {**PROBES, "the clock": _clock, "the router": _router}


async def findings(config: RouterConfig, checks: Iterable[str], admin: AdminClient, *, offline: bool) -> list[Finding]:
    """Run these checks, with their names on stderr. Raises `ConfigError`."""
    of_hub = [m for m in config.models if offline and m.tokenizer != ENGINE_TOKENIZER and not m.has_folders]
    skipped = frozenset(model.name for model in of_hub if model.tokenizer and not is_local(model.tokenizer))
    models = (m.model_copy(update={"tokenizer": None}) if m.name in skipped else m for m in config.models)
    config = config.model_copy(update={"models": tuple(models)})
    found, pools, metrics, fleet = list[Finding](), UpstreamPools(config.limits), Metrics(), Fleet()
    with capture_logs():
        prompts = build_prompts(config, fleet, pools, metrics, load_tokenizer)
        parts = build_fleet(config, PodPriors(config.models, all_priors(config.priors)), metrics, fleet, prompts, pools)
        for name in checks:
            print(f"checking {name} ...", file=sys.stderr)
            try:
                async with asyncio.timeout(CHECK_S):
                    async for finding in CHECKS[name](Subject(config, parts, admin, skipped)):
                        found.append(finding)
            except TimeoutError:
                found.append(Finding("fail", name, f"no result within {CHECK_S:.0f} s; check the network to it"))
        await parts.close()
    pools.close()
    return found


def report(found: Sequence[Finding], *, as_json: bool = False, more: str = "") -> None:
    """Print the findings, and below them `more`. Exit code 1 if one is a failure."""
    if as_json:
        print(json.dumps([one._asdict() for one in found], indent=2))
    for one in () if as_json else found:
        print(printable(f"{one.level:<4} {one.about}: {one.text}"))
    if more and not as_json:
        print(more)
    if any(one.level == "fail" for one in found):
        raise typer.Exit(1)


def _keys(config: RouterConfig) -> Finding:
    file = config.tenants
    tenants = f"{len(TenantFile(Path(file)).read().by_name)} tenants in {file}" if file else "not needed: no `tenants`"
    return Finding("ok", "keys", tenants)


def doctor_command(
    config: Annotated[Path | None, typer.Option(help="The router.yaml.", show_default="the router alone")] = None,
    policies: PoliciesOption = None,
    url: UrlOption = DEFAULT_URL,
    bearer_file: BearerOption = None,
    offline: Annotated[bool, flag("--offline", "Skip tokenizers that come from the hub.")] = False,
    as_json: JsonOption = False,
) -> None:
    found, parsed, checks = list[Finding](), RouterConfig(), ["the router"]
    try:
        if config is not None:
            parsed, _ = check_router(config, policies or shipped("policies"), offline=offline)
            found, checks = [Finding("ok", f"configuration {config}", "valid"), _keys(parsed)], [*CHECKS]
    except ConfigError as error:
        found = [Finding("fail", "configuration", line) for line in str(error).splitlines()]
    listen = parsed.admin
    if url == DEFAULT_URL:
        url = f"unix:{listen.socket}" if listen.socket else f"http://{join_address(listen.host, listen.port)}"
    admin = AdminClient(url, bearer_file or (Path(listen.bearer_file) if listen.bearer_file else None))
    found += asyncio.run(findings(parsed, checks, admin, offline=offline))
    report(found, as_json=as_json, more="" if config else MORE)
