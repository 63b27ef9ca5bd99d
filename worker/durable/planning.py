"""Plans of functions: `ctx.plan`, and the end of a scope that a plan has as a step.

The plan is recorded once, as an event `planned`, and kept in one field of the checkpoint (`function_plan.py`), so that
a resumed run, the handoff document and `perdure task show` know it however long the log is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.wording import shortened
from ..errors import StepDefinitionError
from .event_calls import log_once
from .journal.function_plan import MAX_STEPS, MAX_TEXT, FunctionPlan
from .journal.run_events import Planned, PlannedStep
from .journal.step_record import PLANNED
from .run import Run
from .steps.current import check_call, check_name

_RECORD: Final = "#plan"
"""Name of the records of `ctx.plan`."""


async def make_plan(run: Run, steps: Iterable[Any], why: str = "") -> list[str]:
    """Record the plan of a function, in place of a former one, and return the names of its steps.

    An earlier run may have recorded another plan here: its names are returned.

    Raises `StepDefinitionError`, `StepOutsideTask`, `PayloadTooLarge`, `LeaseLost`.
    """
    await check_call(run, _RECORD, own=True)
    if run.keys.within is not None:
        raise StepDefinitionError("ctx.plan is for functions: the plan of an agent is what its method plan returns")
    given: object = why
    if not isinstance(given, str):
        raise StepDefinitionError(f"why of a plan must be a text, got {given!r}")
    scope = run.keys.scope
    planned = _planned(run, scope, steps)
    again = run.keys.is_given(f"{scope}{_RECORD}")

    def stored(event: Planned) -> list[Entry]:
        plan = FunctionPlan.after(FunctionPlan.decode(run.history.saved.get(PLANNED)), event)
        data = run.history.saved[PLANNED] = plan.encode()
        return [Entry(Kind.SAVED, PLANNED, data)]

    event = Planned(steps=planned, why=why, again=again)
    _, recorded = await log_once(run, event, name=_RECORD, also=stored)
    return [step.key.removeprefix(scope).partition("#")[0] for step in recorded.steps]


def _planned(run: Run, scope: str, steps: Iterable[Any]) -> tuple[PlannedStep, ...]:
    """Return the steps of a plan under the keys that the steps get. Raises `StepDefinitionError`."""
    if isinstance(steps, (str, bytes)) or not isinstance(steps, Iterable):
        raise StepDefinitionError(f"plan must be a list of names or of PlanStep, got {steps!r}")
    listed = list(steps)
    if not 0 < len(listed) <= MAX_STEPS:
        raise StepDefinitionError(f"plan must have 1 to {MAX_STEPS:,} steps, got {len(listed):,}")
    times: Counter[str] = Counter()
    found: list[PlannedStep] = []
    for step in listed:
        name, title = (step, step) if isinstance(step, str) else _key_and_title(step)
        check_name("step of a plan", name)
        times[name] += 1
        if run.redact is not None:  # before the cut could split a secret
            title = run.redact(title)
        key = name if times[name] == 1 else f"{name}#{times[name]}"
        found.append(PlannedStep(key=f"{scope}{key}", title=shortened(title, MAX_TEXT)))
    return tuple(found)


def _key_and_title(step: object) -> Sequence[str]:
    found = (getattr(step, "key", None), getattr(step, "title", None))
    if not all(isinstance(text, str) for text in found):
        raise StepDefinitionError(f"plan must be a list of names or of PlanStep, got an item {step!r}")
    return [str(text) for text in found]


@contextmanager
def planned_scope(run: Run, name: str) -> Iterator[None]:
    """Return a scope of steps, whose end is noted if it is a step of the plan and nothing was raised."""
    with run.keys.scoped(name):
        scope = run.keys.scope.removesuffix("/")
        yield
    note_end(run, scope)


def note_end(run: Run, scope: str) -> None:
    """Note that a scope of steps has ended, if it is a step of the plan."""
    data = run.history.saved.get(PLANNED)
    if data is None or run.stopped or (plan := FunctionPlan.decode(data)) is None:
        return
    if scope in plan.ended or all(step.key != scope for step in plan.steps):
        return
    data = run.history.saved[PLANNED] = plan.model_copy(update={"ended": (*plan.ended, scope)}).encode()
    run.recorder.put_soon(Entry(Kind.SAVED, PLANNED, data))
