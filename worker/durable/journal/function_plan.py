"""Plan of a function, as `ctx.plan` stores it: the steps to come, and which of them are done.

The plan is one field of the checkpoint, which the act that logs `planned` replaces. Whether a step is done is not
stored there: the records of the steps say so.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from ....queues.wording import shortened
from .run_events import Planned, PlannedStep

MAX_STEPS: Final = 1000
"""Largest number of steps of a plan, and of the steps of former plans that are kept."""

MAX_TEXT: Final = 200
"""Characters of a title, and of the reason of a plan, that are kept."""

_WAITS: Final = "#wait:"
"""Beginning of the names of the records of waits for answers."""

PlanStatus = Literal["done", "running", "failed", "pending"]


class PlannedItem(NamedTuple):
    """Step of a plan with its status. key: under which the step is recorded."""

    key: str
    title: str
    status: PlanStatus


class FormerStep(PlannedStep):
    """Step of a plan that another one replaced. why: reason of that one."""

    why: str = ""


class FunctionPlan(BaseModel):
    """Plan of a function.

    Attributes:
        why: Reason of a plan that replaced another one.
        former: Steps of former plans that this one does not have.
        ended: Names of the scopes of this plan that have ended.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    v: int = 1
    steps: tuple[PlannedStep, ...] = ()
    why: str = ""
    former: tuple[FormerStep, ...] = ()
    ended: tuple[str, ...] = ()

    @classmethod
    def decode(cls, data: bytes | None) -> FunctionPlan | None:
        """Read what `encode` returned; None without a plan, and if it cannot be read."""
        try:
            return None if data is None else cls.model_validate_json(data)
        except ValidationError:
            return None

    def encode(self) -> bytes:
        """Return the stored form."""
        return self.model_dump_json(exclude_defaults=True).encode()

    @classmethod
    def after(cls, former: FunctionPlan | None, event: Planned) -> FunctionPlan:
        """Return the plan that an event makes, in place of a former one."""
        if former is None:
            return cls(steps=event.steps, why=shortened(event.why, MAX_TEXT))
        planned, why = {step.key for step in event.steps}, shortened(event.why, MAX_TEXT)
        left = [FormerStep(key=step.key, title=step.title, why=why) for step in former.steps]
        kept = [step for step in (*former.former, *left) if step.key not in planned][-MAX_STEPS:]
        known = planned.union(step.key for step in kept)
        ended = tuple([scope for scope in former.ended if scope in known])
        return cls(steps=event.steps, why=why, former=tuple(kept), ended=ended)

    def records(self) -> list[str]:
        """Return the keys of the records by which the steps may be done."""
        keys = [step.key for step in (*self.former, *self.steps)]
        return [*keys, *map(_key_of_wait, keys)]

    def items(
        self, done: Collection[str], *, running: Collection[str] = (), failed: Collection[str] = ()
    ) -> list[PlannedItem]:
        """Return the steps with their status: those of former plans that are done, then those of this plan.

        Args:
            done: Keys of records.
            running: Keys of steps that have started and have no record.
            failed: Keys of records that are failures.
        """
        found = _Found(done, running, failed, self.ended)
        former = [PlannedItem(step.key, step.title, found.status(step.key)) for step in self.former]
        kept = [item for item in former if item.status in ("done", "failed")]
        return kept + [PlannedItem(step.key, step.title, found.status(step.key)) for step in self.steps]

    def replaced(self, done: Collection[str], *, failed: Collection[str] = ()) -> list[FormerStep]:
        """Return the steps of former plans that were not done."""
        found = _Found(done, (), failed, self.ended)
        return [step for step in self.former if found.status(step.key) not in ("done", "failed")]

    def position(
        self, done: Collection[str], *, running: Collection[str] = (), failed: Collection[str] = ()
    ) -> tuple[int, int, PlannedItem | None]:
        """Return the number of the step to continue with, from 1, the number of all, and the step; None if all ended.

        Then the number is that of the last step.
        """
        items = self.items(done, running=running, failed=failed)
        for number, item in enumerate(items, 1):
            if item.status in ("running", "pending"):
                return number, len(items), item
        return len(items), len(items), None


class _Found:
    """Records of a task, as the steps of a plan are compared with them."""

    def __init__(
        self, done: Collection[str], running: Collection[str], failed: Collection[str], ended: Collection[str]
    ) -> None:
        self._done = set(done).difference(failed)
        self._running = set(running)
        self._failed = set(failed)
        self._scopes = {key[:place] for key in self._done | self._running for place in _ends_of_scopes(key)}
        self._with_ids = {key.partition("#:")[0] for key in self._done if "#:" in key}
        self._ended = ended

    def status(self, key: str) -> PlanStatus:
        """Return the status of a step of the plan, which may be a step, a wait for an answer, or a scope of steps."""
        if key in self._done or key in self._ended or key in self._with_ids or _key_of_wait(key) in self._done:
            return "done"
        if key in self._failed:
            return "failed"
        return "running" if key in self._running or key in self._scopes else "pending"


def _key_of_wait(key: str) -> str:
    scope, slash, name = key.rpartition("/")
    return f"{scope}{slash}{_WAITS}{name}"


def _ends_of_scopes(key: str) -> list[int]:
    return [place for place, letter in enumerate(key) if letter == "/"]


def state_of(
    plan: FunctionPlan, done: Collection[str], *, running: Collection[str] = (), failed: Collection[str] = ()
) -> dict[str, Any]:
    """Return the plan as the fields of a state (see `AgentState`): `plan` and `replaced`."""
    items = plan.items(done, running=running, failed=failed)
    replaced = plan.replaced(done, failed=failed)
    return {
        "plan": [item._asdict() for item in items],
        "replaced": [{"key": step.key, "title": step.title, "why": step.why} for step in replaced],
    }
