"""Guards of the scripts and of the worker: where they are, and what runs without one of them.

A guard is a condition: of a branch that refuses (it ends in `return`, `break`, `continue` or `raise`) or that protects
what it contains, of a loop that waits, or of a function that returns a condition. Or it is an act that the next
statement relies on: an `await` whose value nothing takes. These are no guards: a condition that only tells whether
there is a value, because the program would not pass the type check without it; one that only reads an option of the
call or the kind of a value; a block that only logs.

Without the guard, a branch that refuses is never taken, another one always, a loop does not wait, and a returned
condition holds. Each evaluation of the condition is counted in which this makes a difference.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any, Final

from ..engine import set_lua_function

__all__ = ["Guard", "Survey", "guards_of_modules", "guards_of_scripts", "rewritten"]

ROOT: Final = Path(__file__).parents[3]

_SCRIPTS: Final = (
    *("fence", "seen", "claim", "raise_count", "renew_leases", "write_checkpoint"),
    *("finish", "reschedule", "park", "release", "quarantine", "take_quarantined", "clear_quarantined"),
    *("enqueue", "schedule", "promote", "enqueue_successor", "confirm_successor", "enqueue_copy"),
    *("send_message", "cancel", "retention", "due"),
)
_SCRIPT_PATHS: Final = (
    *(f"queues/lua/{name}.lua" for name in _SCRIPTS),
    *(f"deadletter/lua/{name}.lua" for name in ("bury", "replay")),
)
_MODULES: Final = (
    *(f"queues/delivery/{name}.py" for name in ("consumer", "heartbeat", "leases", "due_set", "checkpoint")),
    *("queues/transport/pipelining.py", "queues/transport/blocking.py"),
    *(f"worker/runtime/{name}.py" for name in ("executor", "intake", "reclaim", "settler", "slots", "quarantine_gate")),
    *(f"worker/durable/{name}.py" for name in ("checkpoint_writer", "run", "continuation")),
    *(f"worker/runtime/stages/{name}.py" for name in ("crash_limit", "successor")),
)

_FUNCTION: Final = "_guard"
"""Name of the function that takes the place of a condition."""


@dataclass
class Guard:
    """A guard of a script or a module.

    Attributes:
        part: Which operand of the line's `and`, from 0; which one counts from 0 also if there is only one.
        text: What is left out.
    """

    path: str
    line: int
    part: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" + (f"#{self.part}" if self.part else "")

    def take_out(self) -> Callable[[bytes], bytes]:
        """Take the guard out: return the change of scripts, and change its module before that is imported."""
        return _replace([self], self._replaced)

    def _replaced(self, name: str, found: Any, wanted: bool) -> bool:
        """Return the value that the condition has without the guard."""
        return wanted


def _replace(guards: Sequence[Guard], function: Callable[[str, Any, bool], Any]) -> Callable[[bytes], bytes]:
    """Let a function decide what conditions are: return the change of scripts, and change modules before their import.

    The function gets the name of the guard, its condition, and what that is without the guard.
    """
    setattr(builtins, _FUNCTION, function)
    set_lua_function(_FUNCTION, lambda name, found, wanted: function(name.decode(), found, wanted))
    by_path: dict[str, set[str]] = {}
    for guard in guards:
        by_path.setdefault(guard.path, set()).add(str(guard))
    changes = []
    for path, names in by_path.items():
        if path.endswith(".lua"):
            text = (ROOT / path).read_text()
            changes.append((text.encode(), rewritten(path, partial(_call, names)).encode()))
    get_code = importlib.machinery.SourceFileLoader.get_code

    def changed_code(loader: Any, name: str) -> CodeType | None:
        path = Path(loader.path).resolve()
        own = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else ""
        if own not in by_path:
            return get_code(loader, name)
        tree = _Replacement(own, by_path[own]).visit(ast.parse(path.read_text()))
        return compile(ast.fix_missing_locations(tree), loader.path, "exec")

    # the process ends after these runs, so the loader is not restored
    importlib.machinery.SourceFileLoader.get_code = changed_code  # type: ignore[method-assign, assignment]

    def alter(source: bytes) -> bytes:
        for old, new in changes:
            source = source.replace(old, new)
        return source

    return alter


def _call(names: Collection[str], guard: Guard, wanted: str) -> str:
    name = str(guard)
    return f"{_FUNCTION}('{name}', not not ({guard.text}), {wanted})" if name in names else guard.text


@dataclass
class Survey:
    """What runs ask of guards.

    Attributes:
        asked: Seeds that evaluate a guard, by its name.
        needed: Seeds in which it makes a difference.
        seed: The one that is played.
    """

    asked: dict[str, list[int]] = field(default_factory=dict)
    needed: dict[str, list[int]] = field(default_factory=dict)
    seed: int = 0

    def counts(self, name: str) -> tuple[int, int]:
        """Return how many seeds evaluate a guard, and how many need it."""
        return len(self.asked.get(name, ())), len(self.needed.get(name, ()))

    def watch(self) -> Callable[[bytes], bytes]:
        """Watch all guards of this process: return the change of scripts, and change modules before their import."""
        return _replace([*guards_of_scripts(), *guards_of_modules()], self._note)

    def _note(self, name: str, found: Any, wanted: bool) -> Any:
        for seeds, counts in ((self.asked, True), (self.needed, bool(found) != wanted)):
            known = seeds.setdefault(name, [])
            if counts and (not known or known[-1] != self.seed):
                known.append(self.seed)
        return found


# scripts

_BRANCH: Final = re.compile(r"^( *)(if|elseif) (.*?)( then)?$")
_OPTION: Final = re.compile(
    r"(kind|name|value|step|ARGV\[\d+\]|#ARGV) [=~]= ('\w*'|\d+)( or name == '\w+')*|KEYS\[\d+\]"
)
"""Conditions that only say what the caller wants."""

_LEAVES: Final = re.compile(r" *(return|break)\b")
_WRITES: Final = re.compile(r"redis\.call\(|\b(close|keep_payload|begin_outcome|put_off|count_returned)\(")


def guards_of_scripts() -> list[Guard]:
    """Return the guards of all scripts that the simulated workers and producers call."""
    found: list[Guard] = []

    def keep(guard: Guard, wanted: str) -> str:
        found.append(guard)
        return guard.text

    for path in sorted(_SCRIPT_PATHS):
        rewritten(path, keep)
    return found


def rewritten(path: str, replace: Callable[[Guard, str], str]) -> str:
    """Return a script with other conditions. `replace` gets each guard, and what is in its place without it."""
    lines = (ROOT / path).read_text().split("\n")
    changed, at = [], 0
    while at < len(lines):
        begin, line, at = at, lines[at], at + 1
        branch = _BRANCH.match(line)
        indent = line[: len(line) - len(line.lstrip())]
        if branch is not None:
            while not lines[at - 1].endswith(" then"):
                at += 1
            condition = " ".join(one.strip() for one in lines[begin:at])
            condition = condition.removeprefix(branch[2]).removesuffix("then").strip()
            if not _OPTION.fullmatch(condition):
                condition = replace(Guard(path, begin + 1, 0, condition), _is_taken(lines, at, indent))
            line = f"{indent}{branch[2]} {condition} then"
        elif re.match(r" *return [^{]", line) and re.search(r" (==|~=|<|>|<=|>=|and) ", line):
            operands = line.strip().removeprefix("return ").split(" and ")
            most = len(operands) - (
                len(operands) > 1 and re.search(r" or |^(?!.* (==|~=|<|>) )", operands[-1]) is not None
            )
            left = [replace(Guard(path, begin + 1, part, operands[part]), "true") for part in range(most)]
            line = f"{indent}return {' and '.join([*left, *operands[most:]])}"
        changed.append(line)
    return "\n".join(changed)


def _is_taken(lines: list[str], begin: int, indent: str) -> str:
    """Return whether a branch without its condition is taken always: not if it refuses, or writes nothing."""
    body = []
    for line in lines[begin:]:
        if line.startswith((f"{indent}else", f"{indent}end")):
            break
        body.append(line)
    leaves = any(
        _LEAVES.match(line) and line.startswith(f"{indent}  ") and line[len(indent) + 2] != " " for line in body
    )
    return "true" if not leaves and _WRITES.search("\n".join(body)) else "false"


# modules


def guards_of_modules() -> list[Guard]:
    """Return the guards of the modules through which a delivery goes."""
    found = []
    for path in sorted(_MODULES):
        finder = _Finder(path)
        finder.visit(ast.parse((ROOT / path).read_text()))
        found += finder.found
    return found


class _Walk(ast.NodeTransformer):
    """Walk over the guards of a module. `at` is called with each; it returns what takes its place."""

    def __init__(self) -> None:
        self._returns: list[bool] = []
        self._options: list[set[str]] = []

    def at(self, node: ast.stmt, part: int, what: ast.expr, wanted: bool | None) -> ast.expr:
        """Return what takes the place of a condition, or of an awaited value (wanted: None)."""
        raise NotImplementedError

    def visit_FunctionDef(self, node: Any) -> Any:
        self._returns.append(isinstance(node.returns, ast.Name) and node.returns.id == "bool")
        arguments = (*node.args.args, *node.args.kwonlyargs)
        self._options.append({one.arg for one in arguments if one.annotation and ast.unparse(one.annotation) == "bool"})
        self.generic_visit(node)
        self._body(node.body)
        self._returns.pop()
        self._options.pop()
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - the name that `ast` looks for

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        option = isinstance(node.test, ast.Name) and node.test.id in self._options[-1]
        if not option and not _is_about_value(node.test) and not _is_quiet(node.body):
            leaves = isinstance(node.body[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))
            node.test = self.at(node, 0, node.test, not leaves)
        self._body(node.body)
        self._body(node.orelse)
        return node

    def visit_While(self, node: ast.While) -> Any:
        self.generic_visit(node)
        if isinstance(node.test, ast.UnaryOp) and any(isinstance(one, ast.Await) for one in ast.walk(node)):
            node.test = self.at(node, 0, node.test, False)
        self._body(node.body)
        return node

    def visit_With(self, node: Any) -> Any:
        self.generic_visit(node)
        self._body(node.body)
        return node

    visit_AsyncWith = visit_With  # noqa: N815 - the name that `ast` looks for

    def visit_Try(self, node: ast.Try) -> Any:
        self.generic_visit(node)
        for body in (node.body, node.orelse, node.finalbody, *(handler.body for handler in node.handlers)):
            self._body(body)
        return node

    def visit_Return(self, node: ast.Return) -> Any:
        if (
            self._returns
            and self._returns[-1]
            and isinstance(node.value, (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Call))
        ):
            value = node.value
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "bool":
                value = value.args[0]  # type: ignore[assignment]
            if isinstance(value, ast.BoolOp) and isinstance(value.op, ast.And):
                for part, operand in enumerate(value.values):
                    value.values[part] = self.at(node, part, operand, True)
            elif not isinstance(value, ast.Call):
                node.value = self.at(node, 0, value, True)
        return node

    def _body(self, body: list[ast.stmt]) -> None:
        """Look at the awaits of a block that another statement follows."""
        for node in body[:-1]:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Await) and node.lineno == node.end_lineno:
                node.value = self.at(node, 0, node.value, None)


class _Finder(_Walk):
    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self.found: list[Guard] = []

    def at(self, node: ast.stmt, part: int, what: ast.expr, wanted: bool | None) -> ast.expr:
        self.found.append(Guard(self._path, node.lineno, part, ast.unparse(what)))
        return what


class _Replacement(_Walk):
    def __init__(self, path: str, names: Collection[str]) -> None:
        super().__init__()
        self._path = path
        self._names = names

    def at(self, node: ast.stmt, part: int, what: ast.expr, wanted: bool | None) -> ast.expr:
        name = str(Guard(self._path, node.lineno, part, ""))
        if name not in self._names:
            return what
        if wanted is not None:
            return _called(name, what, wanted)
        # an await: the function is asked whether to leave it out
        return ast.IfExp(_called(name, ast.Constant(False), True), ast.Constant(None), what)


def _called(name: str, what: ast.expr, wanted: bool) -> ast.expr:
    return ast.Call(ast.Name(_FUNCTION, ast.Load()), [ast.Constant(name), what, ast.Constant(wanted)], [])


def _is_about_value(test: ast.expr) -> bool:
    """Return whether a condition only tells whether there is a value, or of which kind it is."""
    match test:
        case ast.Compare(comparators=[ast.Constant()], ops=[ast.Is() | ast.IsNot() | ast.Eq()]):
            return not (isinstance(test.comparators[0], ast.Constant) and isinstance(test.comparators[0].value, int))
        case ast.Call(func=ast.Name(id="isinstance")):
            return True
    return False


def _is_quiet(body: list[ast.stmt]) -> bool:
    """Return whether a block only logs."""
    return all(isinstance(one, ast.Expr) and re.search(r"\b(logger|bound)\.", ast.unparse(one)) for one in body)
