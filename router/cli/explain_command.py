"""`warmroute explain`: prints why a request went to its pod, from a running router or from a file of receipts.

One column per candidate, one row per part of its cost, and the outcome; with `--formulas` also the formulas and their
inputs, to recompute the costs by hand. The printed parts add up to the printed total. No prompt is printed.

`warmroute preview` prints where it would send a chat request, and why. Nothing is sent to a pod.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from router.cli.admin_client import DEFAULT_URL, AdminClient, BearerOption, UrlOption, fail
from router.cli.options import PoliciesOption, flag, with_options
from router.cli.receipt_files import lines_of, local, recorded, time_option
from router.cli.terminal import printable
from router.config.load import shipped
from router.config.policy_files import load_policies
from router.observe.receipts import Explained, Receipt, explained_later
from router.policy.catalog import DELAYS
from router.policy.eligible import LeftOut
from router.policy.explain import Column, Explanation, TermNote, printed

ORDINALS = ("chosen", "runner-up", "third", "fourth")
NONE = "-"
NAMED_PODS = 4
"""Pods named of those that a filter excluded."""
MINUTE_S = 60
PROMPT_ROWS = 2
"""The first inputs of every column, n and p, are printed even if they are 0."""
FormulasOption = Annotated[bool, flag("--formulas", "Print the formulas and their inputs, too.")]


@dataclass(frozen=True, slots=True)
class ExplainOptions:
    request_id: Annotated[
        str, typer.Argument(help="Value of the response header x-request-id.", show_default="with --file: any")
    ] = ""
    file: Annotated[Path | None, typer.Option(help="File of receipts.", show_default="ask the router")] = None
    at: Annotated[float | None, time_option("With --file: arrived in the minute from", "any")] = None
    model: Annotated[str, typer.Option(help="With --file: of this model.", show_default="any")] = ""
    tenant: Annotated[str, typer.Option(help="With --file: of this tenant.", show_default="any")] = ""
    pod: Annotated[str, typer.Option(help="With --file: served by this pod.", show_default="any")] = ""
    slow: Annotated[bool, flag("--slow", "With --file: those with the slowest first tokens.")] = False
    limit: Annotated[int, typer.Option(min=1, max=100, help="With --file: requests to explain.")] = 1
    formulas: FormulasOption = False
    policies: PoliciesOption = None
    url: UrlOption = DEFAULT_URL
    bearer_file: BearerOption = None

    def wants(self, one: Receipt) -> bool:
        given = (self.request_id, one.id), (self.model, one.model), (self.tenant, one.tenant), (self.pod, one.pod)
        is_then = self.at is None or 0 <= one.at_s - self.at < MINUTE_S
        return is_then and all(wanted in ("", found) for wanted, found in given)

    def rank(self, one: Receipt) -> float:
        """The first is explained first. Without a time to first token, the whole time counts as slow."""
        return -(one.e2e_ms if one.ttft_ms is None else one.ttft_ms) if self.slow else one.at_s


@with_options(ExplainOptions)
def explain_command(options: ExplainOptions) -> None:
    if options.file:
        return _explain_file(options, options.file)
    if not options.request_id:
        raise typer.BadParameter("give a REQUEST_ID, or --file and --at")
    path = f"/admin/explain/{quote(options.request_id, safe='')}"
    found = AdminClient(options.url, options.bearer_file).ask("GET", path, Explained)
    return Console().print(page(found, formulas=options.formulas))


def _explain_file(options: ExplainOptions, file: Path) -> None:
    lines = (line for line in lines_of(file) if not isinstance(line, Receipt) or options.wants(line))
    matches, policies = count(), load_policies(options.policies or shipped("policies"))
    found = heapq.nsmallest(
        options.limit, zip(recorded(lines), matches, strict=False), key=lambda one: options.rank(one[0][0])
    )
    if not found:
        fail(f"{file}: no such request; `warmroute receipts summary {file}` prints what the file has")
    print(f"{next(matches):,} requests; explained: {len(found)}")
    for (receipt, scene), _ in found:
        Console().print("", printable(f"arrived at {local(receipt.at_s)}, class {receipt.workload or NONE}"))
        found_later = explained_later(receipt, scene, policies.get(receipt.policy))
        Console().print(page(found_later, formulas=options.formulas))


def page(found: Explained, unfinished: str = "not finished", *, formulas: bool = False) -> RenderableType:
    """The decision, its costs and its outcome, and if wanted the formulas with their inputs.
    `unfinished` is the outcome of a request without a result."""
    explanation, receipt = found.explanation, found.receipt
    fallback = f"; fallback: {receipt.fallback}" if receipt.fallback else ""
    asked = f" (asked for as {receipt.name}{fallback})" if receipt.name else ""
    policy = f"  policy {explanation.policy} (version {explanation.version})" if explanation.policy else ""
    parts: list[RenderableType] = [
        printable(f"{explanation.request_id}  model {explanation.model}{asked}{policy}"),
        Padding(Group(*map(printable, (explanation.why, *_left_out(explanation.left_out)))), (1, 0, 0, 0)),
    ]
    if explanation.columns:
        table = _table(explanation, receipt, inputs=formulas)
        parts += [Padding(_choices(explanation.columns, receipt), (1, 0, 0, 0)), Padding(table, (1, 0, 0, 0))]
    effective = {name for column in explanation.columns for name, ms in column.plan.parts if ms}
    if formulas and (terms := [note for note in explanation.terms if note.name in effective]):
        parts.append(_formulas(terms))
    offers = (
        f"else {one.choice}: first token after about {one.ttft_ms:,.0f} ms, money {one.money:.6f}"
        for one in found.providers
    )
    if lines := [*offers, *_outcome(receipt, unfinished)]:
        parts.append(Padding(Group(*map(printable, lines)), (1, 0, 0, 0)))
    return Group(*parts)


def _left_out(found: Sequence[LeftOut]) -> Iterator[str]:
    """One line per filter: the pods that it excluded, or that it was ignored."""
    for each in found:
        if each.ignored:
            yield f"filter {each.filter}: ignored, since it would leave no usable pod"
        else:
            others = f" and {more} more" if (more := len(each.pods) - NAMED_PODS) > 0 else ""
            pods = "pod" if len(each.pods) == 1 else "pods"
            yield f"filter {each.filter}: excluded {len(each.pods)} {pods}: {', '.join(each.pods[:NAMED_PODS])}{others}"


# --- the table ---


def _choices(columns: Sequence[Column], receipt: Receipt) -> Table:
    """The pods of each candidate in full, so that their names can be copied."""
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for at, column in enumerate(columns):
        table.add_row(_title(at, column, receipt), printable(column.plan.choice))
    return table


def _table(explanation: Explanation, receipt: Receipt, *, inputs: bool) -> Table:
    columns = explanation.columns
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column(f"{len(columns)} of {explanation.candidate_count} candidates", no_wrap=True)
    for at, column in enumerate(columns):
        table.add_column(_title(at, column, receipt), justify="right", overflow="fold")
    for label, *cells in _price_rows(columns):
        table.add_row(label, *cells, style="bold" if label.startswith("=") else None)
    if inputs and any(column.inputs for column in columns):
        table.add_row()
        table.add_row("inputs of the formulas", style="italic")
        table.add_row("costs of", *(printable(column.costs_of) for column in columns))
        values = [{f"{each.name}, {each.unit}": each.value for each in column.inputs} for column in columns]
        for cells in _rows(values, _number, PROMPT_ROWS):
            table.add_row(*cells)
    return table


def _title(at: int, column: Column, receipt: Receipt) -> str:
    title = ORDINALS[at] if at < len(ORDINALS) else "later"
    served = (receipt.pod, receipt.prefill_pod) == (column.plan.choice.pod, column.plan.choice.prefill_pod)
    return f"{title}, served" if served and receipt.failures else title


def _price_rows(columns: Sequence[Column]) -> Iterator[list[str]]:
    """The parts of the costs and their sums, in total and until the first token. Added in hundredths of a millisecond,
    so that the printed parts add up. Parts that are 0 everywhere are counted in one row."""
    prices = [printed(column.plan) for column in columns]
    rows = list(_rows(prices, _ms))
    yield from ([f"{name}, ms", *cells] for name, *cells in rows)
    if zero := len(set(chain(*prices))) - len(rows):
        yield [f"terms that are 0: {zero}"]
    yield ["= cost, ms", *(_ms(sum(price.values())) for price in prices)]
    delays = [sum(cents for name, cents in price.items() if name in DELAYS) for price in prices]
    yield ["= until first token, ms", *map(_ms, delays)]


def _rows(columns: Sequence[Mapping[str, float]], shown: Callable[[float], str], keep: int = 0) -> Iterator[list[str]]:
    """A row for each name, without those that are 0 in all columns, except the first ones."""
    for at, name in enumerate(dict.fromkeys(chain(*columns))):
        if at < keep or any(column.get(name) for column in columns):
            yield [name, *(shown(column[name]) if name in column else NONE for column in columns)]


def _ms(cents: float) -> str:
    return f"{cents / 100:,.2f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.6g}"


# --- formulas and outcome ---


def _formulas(terms: Sequence[TermNote]) -> RenderableType:
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for note in terms:
        values = [
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in note.parameters.items()
        ]
        lines = [*note.formula.splitlines(), *([", ".join(values)] if values else [])]
        table.add_row(note.name, Group(*map(printable, lines)))
    return Padding(table, (1, 0, 0, 0))


def _outcome(receipt: Receipt, unfinished: str) -> Iterator[str]:
    yield from (f"failed: {one.pod or 'no pod'}: {one.error}: {one.message}" for one in receipt.failures)
    if receipt.predicted_ms is not None:
        ttft = "unknown (known for streams only)" if receipt.ttft_ms is None else f"{receipt.ttft_ms:,.2f} ms"
        cached = "unknown" if receipt.cached_tokens is None else f"{receipt.cached_tokens:,}"
        yield f"first token: expected after {receipt.predicted_ms:,.2f} ms, actual {ttft}"
        yield f"cached tokens: expected {receipt.predicted_cached_tokens or 0:,}, actual {cached}"
    if receipt.fallback:
        yield f"fallback of {receipt.name}, because of: {receipt.fallback}"
    if receipt.money is not None:
        yield f"money of the provider: {receipt.money:.6f}"
    if not receipt.result:
        yield unfinished
    else:
        yield f"result: {receipt.result}, after {receipt.e2e_ms:,.1f} ms"
        yield "phases, ms: " + ", ".join(f"{phase} {ms:,.2f}" for phase, ms in receipt.phases_ms.items())


def preview_command(
    body: Annotated[
        str | None,
        typer.Argument(help="File with the JSON body of a chat request; - for stdin.", show_default="use --prompt"),
    ] = None,
    model: Annotated[str, typer.Option(help="With --prompt: the model.", show_default="none")] = "",
    prompt: Annotated[str, typer.Option(help="A user message, instead of a file.", show_default="none")] = "",
    tenant: Annotated[str, typer.Option(help="On behalf of this tenant.", show_default="none")] = "",
    formulas: FormulasOption = False,
    url: UrlOption = DEFAULT_URL,
    bearer_file: BearerOption = None,
) -> None:
    if bool(body) == bool(model and prompt):
        raise typer.BadParameter("give either a file with a request, or --model and --prompt")
    asked = _read(body) if body else {"model": model, "messages": [{"role": "user", "content": prompt}]}
    path = f"/admin/preview?tenant={quote(tenant)}" if tenant else "/admin/preview"
    found = AdminClient(url, bearer_file).ask("POST", path, Explained, asked)
    Console().print(page(found, unfinished="not sent", formulas=formulas))


def _read(body: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if body == "-" else Path(body).read_bytes()
    except OSError as error:
        fail(f"{body}: cannot be read: {error.strerror}")
