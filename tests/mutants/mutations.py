"""Produces changed versions of a Python file: one comparison, operator, branch, constant or call at a time.

Pure: source text in, source texts out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of a file: at byte `column` of `line`, counted from 1, `before` becomes `after`."""

    path: Path
    line: int
    column: int
    before: str
    after: str

    def applied(self, source: str) -> str:
        """The whole text of the changed file."""
        lines = source.encode().splitlines(keepends=True)
        above = b"".join(lines[: self.line - 1]) + lines[self.line - 1][: self.column]
        return (above + self.after.encode() + source.encode()[len(above) + len(self.before.encode()) :]).decode()

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {_one_line(self.before)}  ->  {_one_line(self.after)}"


def mutants_of(path: Path, source: str) -> Iterator[Mutant]:
    """Every mutant of the file."""
    lines = source.encode().splitlines(keepends=True)
    tree = ast.parse(source)
    named = set(_named_numbers(tree))
    for node in (one for one in _mutable(tree) if id(one) not in named):
        for after in _changes(node):
            yield Mutant(path, node.lineno, node.col_offset, _text(lines, node), after)


def _named_numbers(tree: ast.AST) -> Iterator[int]:
    """The `id` of each number that a module or class gives a name, such as a limit or a default: tests read it by that
    name, so its value is no behaviour."""
    for owner in (one for one in ast.walk(tree) if isinstance(one, ast.Module | ast.ClassDef)):
        for statement in owner.body:
            if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                yield from (id(one) for one in ast.walk(statement.value) if _is_number(one))


def _is_number(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)


def _text(lines: list[bytes], node: ast.expr | ast.stmt) -> str:
    """As in `lines`. `ast.get_source_segment` splits the whole file for each call."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    covered = lines[node.lineno - 1 : node.end_lineno]
    after = len(covered[-1]) - node.end_col_offset
    return b"".join(covered)[node.col_offset : -after or None].decode()


def _mutable(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Nodes whose change can change behaviour: not annotations, not docstrings, not f-string internals."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            continue
        if isinstance(node, ast.expr | ast.stmt):
            yield node
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield node.value
                yield from _mutable(node.value)
        elif isinstance(node, ast.ClassDef):
            # Decorators and keywords of a class (`frozen`, `slots`, `gc`) do not change what correct code does.
            yield from _mutable(ast.Module(node.body, []))
        elif isinstance(node, ast.keyword) and node.arg == "strict":
            continue
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in [*node.body, *node.args.defaults, *(one for one in node.args.kw_defaults if one)]:
                if isinstance(part, ast.expr | ast.stmt):
                    yield part
                yield from _mutable(part)
        else:
            yield from _mutable(node)


def _changes(node: ast.expr | ast.stmt) -> Iterator[str]:
    """Replacement texts for one node."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in SWAPPED:
            yield f"({ast.unparse(ast.Compare(left, [SWAPPED[type(operator)]()], [right]))})"  # type: ignore[list-item]
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in SWAPPED and not _is_text(left, right):
            yield f"({ast.unparse(ast.BinOp(left, SWAPPED[type(operator)](), right))})"  # type: ignore[arg-type]
        case ast.BoolOp(op=operator, values=values):
            yield f"({ast.unparse(ast.BoolOp(SWAPPED[type(operator)](), values))})"  # type: ignore[arg-type]
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield f"({ast.unparse(ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse))})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int() | float() as value):
            yield str(value + 1)
        case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
            yield "pass"


def _is_text(*operands: ast.expr) -> bool:
    return any(isinstance(one, ast.JoinedStr) or (isinstance(one, ast.Constant) and isinstance(one.value, str | bytes))
               for one in operands)  # fmt: skip


def _one_line(text: str) -> str:
    return " ".join(text.split())[:100]
