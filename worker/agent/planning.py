"""Plans as methods of an agent return them: their check, their form in the log, and steps that are archived."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from pydantic import ValidationError

from ...queues.transport.backoff import retry_while_unavailable
from ..durable.run import Run
from ..errors import StepDefinitionError
from ..journal.agent_events import PlannedStep
from ..journal.archive import archived_keys
from ..journal.state import AgentState, PlanStep
from ..log import log_wait
from ..validation_errors import first_problem

_OUTCOME_FIELDS: Final = {"status", "attempts", "error"}
"""Fields of a step that the loop sets, not the plan."""


async def without_archived(run: Run, state: AgentState, steps: Sequence[PlanStep]) -> Sequence[PlanStep]:
    """Return the steps of another plan without archived ones: like closed steps of the plan, they do not run again."""
    if state.archive.steps == 0:
        return steps
    planned = {step.key for step in state.plan}
    asked = [step.key for step in steps if step.key not in planned]
    place = (run.gateway, run.delivery.partition, run.id)
    find = partial(archived_keys, *place, asked, retired=state.archive.retired > 0)
    gone = await retry_while_unavailable(find, on_wait=log_wait(f"the archive of task {run.id}", run.touch))
    return [step for step in steps if step.key not in gone]


@contextmanager
def checked_steps() -> Iterator[None]:
    """Raise `StepDefinitionError` where the block makes a step with missing or wrong fields: no attempt could do it."""
    try:
        yield
    except ValidationError as error:
        if error.title != PlanStep.__name__:
            raise
        found = error.errors(include_url=False)[0]
        given = found["input"] if found["type"] == "missing" else None
        named = f"PlanStep {given['key']!r}" if isinstance(given, Mapping) and "key" in given else "a PlanStep"
        if found["type"] == "missing":
            problem = f"has no {found['loc'][0]}; pass {found['loc'][0]}="
        else:
            problem = f"is not valid: {first_problem(error)}"
        raise StepDefinitionError(f"{named} {problem}") from error


def listed_steps(what: str, steps: object) -> list[PlanStep]:
    """Return the steps that a method of an agent returned as a list.

    Raises `StepDefinitionError` if they are not `PlanStep`s.
    """
    if not isinstance(steps, Iterable) or isinstance(steps, (PlanStep, Mapping, str)):
        raise StepDefinitionError(f"{what} must return a list of PlanStep, got {steps!r}")
    listed = list(steps)
    for step in listed:
        if not isinstance(step, PlanStep):
            raise StepDefinitionError(f"{what} must return a list of PlanStep, got an item {step!r}")
    return listed


def planned_steps(what: str, steps: Sequence[PlanStep]) -> tuple[PlannedStep, ...]:
    """Return the steps as logged. Raises `ValueError` if they are not a valid plan."""
    listed = listed_steps(what, steps)
    for step in listed:
        if not step.key or len(step.key) > 200 or "/" in step.key or "#" in step.key:
            raise ValueError(f"{what}: a step key must be 1 to 200 characters without '/' and '#', got {step.key!r}")
    keys = [step.key for step in listed]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{what}: step keys must be unique, got {twice!r} twice")
    return tuple([PlannedStep.model_validate(step.model_dump(mode="json", exclude=_OUTCOME_FIELDS)) for step in listed])
