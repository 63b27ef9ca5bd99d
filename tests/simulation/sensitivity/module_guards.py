"""Guards of the modules through which a delivery goes, and what runs without one of them show."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from typing import Any, Final

from .guards import FUNCTION, ROOT, Finding, Guard, Kind, numbered

__all__ = ["FINDINGS_OF_MODULES", "guards_of_modules", "without_guards"]

_MODULES: Final = (
    *(f"queues/delivery/{name}.py" for name in ("consumer", "heartbeat", "leases", "due_set", "checkpoint")),
    *("queues/transport/pipelining.py", "queues/transport/blocking.py"),
    *(f"worker/runtime/{name}.py" for name in ("executor", "intake", "reclaim", "settler", "slots", "quarantine_gate")),
    *(f"worker/durable/{name}.py" for name in ("checkpoint_writer", "run", "continuation")),
    *(f"worker/runtime/stages/{name}.py" for name in ("crash_limit", "successor")),
)


def guards_of_modules() -> list[Guard]:
    """Return the guards of the modules through which a delivery goes."""
    found = []
    for path in sorted(_MODULES):
        finder = _Finder(path)
        finder.visit(ast.parse((ROOT / path).read_text()))
        found += finder.found
    return numbered(found)


def without_guards(path: str, names: Collection[str]) -> ast.Module:
    """Return a module in which a function decides what the named guards are."""
    module = ast.parse((ROOT / path).read_text())
    _Replacement(path, names).visit(module)
    return ast.fix_missing_locations(module)


class _Walk(ast.NodeTransformer):
    """Walk over the guards of a module. `at` is called with each; it returns what takes its place."""

    def __init__(self) -> None:
        self._scopes: list[str] = []
        self._returns: list[bool] = []
        self._options: list[set[str]] = []

    def at(self, node: ast.stmt, part: int, what: ast.expr, wanted: bool | None) -> ast.expr:
        """Return what takes the place of a condition, or of an awaited value (wanted: None)."""
        raise NotImplementedError

    @property
    def scope(self) -> str:
        """The innermost function, after its class."""
        return ".".join(self._scopes[-2:])

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        self._scopes.append(node.name)
        self.generic_visit(node)
        self._scopes.pop()
        return node

    def visit_FunctionDef(self, node: Any) -> Any:
        self._scopes.append(node.name)
        self._returns.append(isinstance(node.returns, ast.Name) and node.returns.id == "bool")
        arguments = (*node.args.args, *node.args.kwonlyargs)
        self._options.append({one.arg for one in arguments if one.annotation and ast.unparse(one.annotation) == "bool"})
        self.generic_visit(node)
        self._body(node.body)
        self._returns.pop()
        self._options.pop()
        self._scopes.pop()
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - the name that `ast` looks for

    def visit_If(self, node: ast.If) -> Any:
        if not self._options:  # of the module itself: for type checkers
            return node
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
        self.found.append(Guard(self._path, node.lineno, part, ast.unparse(what), self.scope))
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
    return ast.Call(ast.Name(FUNCTION, ast.Load()), [ast.Constant(name), what, ast.Constant(wanted)], [])


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


FINDINGS_OF_MODULES: Final = (
    Finding(
        "queues/delivery/checkpoint.py, load_history",
        "history.format > DATA_FORMAT",
        "the checkpoint is of a newer version",
        Kind.OUTSIDE,
        "no run has a checkpoint of another format; the version check parks its task before it looks at what was read",
    ),
    Finding(
        "queues/delivery/consumer.py, Consumer.create_groups",
        "await asyncio.gather(*(self._gateway.run(_CREATE, [one.ready, one.nudge], [GROUP]) for one in wanted))",
        "groups exist before they are read",
        Kind.FOUND,
        "liveness",
        1,
    ),
    Finding(
        "queues/delivery/consumer.py, Consumer._read_lane",
        "windows > 1 or block is None",
        "the read does not block",
        Kind.EQUIVALENT,
        "a read that does not block comes before the one that does, and costs a round trip",
    ),
    Finding(
        "queues/delivery/consumer.py, Consumer.claim",
        "unknown and len(claimed) < most",
        "an own entry is unknown, and a slot is free",
        Kind.EQUIVALENT,
        "the second claim takes no more than what is left of the slots",
    ),
    Finding(
        "queues/delivery/due_set.py, promote_due",
        "ids",
        "a task is due",
        Kind.EQUIVALENT,
        "the script promotes no task if it gets none",
    ),
    Finding(
        "queues/delivery/leases.py, Leases.holds",
        "(partition.ready, entry) in self._held",
        "the entry is held",
        Kind.FOUND,
        "liveness",
        7,
    ),
    Finding(
        "queues/transport/pipelining.py, PipelinedConnection.submit",
        "self._closed",
        "the connection is closed",
        Kind.OUTSIDE,
        "no run sends a command after it has closed the connection",
    ),
    Finding(
        "queues/transport/pipelining.py, _Transport.data_received",
        "future.done()",
        "the caller was cancelled",
        Kind.FOUND,
        "no unhandled exception",
        9,
    ),
    Finding(
        "queues/transport/pipelining.py, _Transport._check_silence",
        "not self._unanswered",
        "no reply is outstanding",
        Kind.EQUIVALENT,
        "an idle connection is opened again",
    ),
    Finding(
        "worker/durable/run.py, Run.plan_boundary",
        "self.stopping",
        "the worker stops",
        Kind.FOUND,
        "the run does not end",
        0,
    ),
    Finding(
        "worker/runtime/executor.py, Executor._confirm",
        "not self._leases.had_fence(delivery)",
        "the fence is new to this worker",
        Kind.RARE,
        "the first record is refused instead",
    ),
    Finding(
        "worker/runtime/executor.py, Executor.execute",
        "delivery.has_history",
        "the task has a history",
        Kind.EQUIVALENT,
        "the gate does not know such a delivery, and changes nothing",
    ),
    Finding(
        "worker/runtime/intake.py, Intake._take",
        "await self._claim()",
        "it claims before it reads",
        Kind.FOUND,
        "the run does not end",
        2,
    ),
    Finding(
        "worker/runtime/intake.py, Intake._claim",
        "not self._consumer.mark_unavailable(partition, error)",
        "the only server is away",
        Kind.EQUIVALENT,
        "the next claim fails in its place",
    ),
    Finding(
        "worker/runtime/intake.py, Intake._read",
        "self._may_start(delivery)",
        "a slot is free, the worker does not stop, and the queue is not paused",
        Kind.OUTSIDE,
        "in no run is a slot taken, the worker stopped, or the queue paused, while it reads",
    ),
    Finding(
        "worker/runtime/quarantine_gate.py, QuarantineGate.idle",
        "self.dedicated and self._link is not None",
        "the worker runs suspects only",
        Kind.FOUND,
        "no exception is logged",
        8,
    ),
    Finding(
        "worker/runtime/slots.py, Slots.leave",
        "task in self._busy",
        "the slot is occupied",
        Kind.EQUIVALENT,
        "a slot that is free stays so; those that wait for a change look again",
    ),
    Finding(
        "worker/runtime/stages/crash_limit.py, CrashLimit.__call__",
        "crashes < 1",
        "a worker of the task died",
        Kind.EQUIVALENT,
        "without a crash, no limit is reached",
    ),
    Finding(
        "worker/runtime/stages/successor.py, _forward",
        "await run.recorder.put(Entry(Kind.TRANSFERRED, handed_to, handed_to.encode()), wait=True)",
        "messages go to the successor first",
        Kind.FOUND,
        "liveness",
        39,
    ),
)
