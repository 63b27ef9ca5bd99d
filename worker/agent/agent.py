"""What an agent is: a class that plans, acts and finishes, over a state that the runtime keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args, get_origin

from ..durable import AlreadyDone, Context
from ..journal import AgentState, PlanStep
from ..memory import NewMemory
from .coherence import Coherence

__all__ = ["Agent", "S"]

S = TypeVar("S", bound=AgentState)


class Agent(Generic[S]):
    """An agent. Subclass it with the type of its state:

    class Research(Agent[ResearchState]):
        async def plan(self, ctx, state): ...
        async def act(self, ctx, state, step): ...
        async def finish(self, ctx, state): ...

    The runtime makes an instance per run, without arguments, and calls it: `plan` once, `act` for every step of the
    plan in its order, `finish` once. What they change in the state is stored in the act that stores that they are
    done; when one is cut off, the changes are undone, and it is called again with the steps (`ctx.step`) that it had
    recorded. So the state is the agent's only memory: what stands in `self` does not outlive the run.

    in_doubt: what becomes of a risky step that was begun and has no record, where there is no `verify`: `retry` acts
    again, `fail` sends the task to the dead letters. snapshot_every: events between two snapshots of the state, which
    bounds what a resumed run reads. save_every: seconds between two saves of a step's `progress`. coherence: checks of
    whether it still knows what it is doing, see docs/explanation/coherence.md.
    """

    state_type: ClassVar[type[AgentState]] = AgentState
    in_doubt: ClassVar[Literal["retry", "fail"]] = "retry"
    snapshot_every: ClassVar[int] = 50
    save_every: ClassVar[float] = 60.0
    coherence: ClassVar[Coherence] = Coherence()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for base in cls.__dict__.get("__orig_bases__", ()):
            origin = get_origin(base)
            if isinstance(origin, type) and issubclass(origin, Agent):
                for argument in get_args(base):
                    if isinstance(argument, type) and issubclass(argument, AgentState):
                        cls.state_type = argument

    async def plan(self, ctx: Context, state: S) -> Sequence[PlanStep]:
        """The steps to be taken, in their order."""
        raise NotImplementedError(f"{type(self).__name__} has no plan")

    async def act(self, ctx: Context, state: S, step: PlanStep) -> Any:
        """Take one step. What it returns is JSON data, or of the type it declares, and goes to `state.results`.

        The keys of steps called in here begin with that of this one.
        """
        raise NotImplementedError(f"{type(self).__name__} has no act")

    async def finish(self, ctx: Context, state: S) -> Any:
        """The result, when every step of the plan is done."""
        raise NotImplementedError(f"{type(self).__name__} has no finish")

    async def remember(self, ctx: Context, state: S) -> Sequence[NewMemory | str]:
        """What is worth knowing beyond this task, called after `finish`: texts, or memories of a type of their own.

        It goes to the long-term memory under the agent's name before the outcome is stored, and only once.
        """
        return ()

    async def replan(self, ctx: Context, state: S) -> Sequence[PlanStep] | None:
        """Called after each step: new steps for those that are still open, or None where the plan stays.

        Where a step failed, `state.current` is its key, and its `error` says why; else that is None. With new steps it
        is given up, unless it is among them; without, it is retried with the task.
        """
        return None

    async def verify(self, ctx: Context, state: S, step: PlanStep) -> AlreadyDone[Any] | None:
        """Of a risky step that was begun and has no record: whether it happened, with its result."""
        return None
