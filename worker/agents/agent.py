"""Base class of agents: plan, act and finish over a state that the runtime stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args, get_origin

from ..context import Context
from ..durable.journal.resumption import Resumption
from ..durable.steps.current import AlreadyDone
from ..memory.memory import NewMemory
from .coherence.findings import Coherence
from .identity import Identity
from .journal.state import AgentState, PlanStep

S = TypeVar("S", bound=AgentState)


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps of a plan, and the reason for it. why: in the log, and for the steps that it replaces, in later prompts."""

    steps: Sequence[PlanStep]
    why: str = ""


class Agent(Generic[S]):
    """An agent, subclassed with the type of its state:

    class Research(Agent[ResearchState]):
        async def plan(self, ctx, state): ...
        async def act(self, ctx, state, step): ...
        async def finish(self, ctx, state): ...

    The runtime creates an instance per run, without arguments, and calls `plan` once, `act` for each step of the plan
    in order, and `finish` once. Their changes to the state are stored atomically with the record that they are done. A
    method that is cut off is called again, with its changes undone and with the steps (`ctx.step`) that it recorded.
    Attributes of `self` do not outlive the run; only the state does.

    Attributes:
        in_doubt: what to do with a risky step that started and has no record, if `verify` is not defined: `retry` runs
            it again, `fail` makes the task a dead letter, and a person decides (`perdure task resolve`).
        snapshot_every: events between two snapshots of the state; it bounds what a resumed run reads.
        keep_steps: closed steps, with their results, that stay in the state; None: all. Older ones are archived:
            `ctx.recall_step` returns them, `finish` has their results, and `replan` cannot plan their keys again.
        keep_messages: messages that stay in the state; None: all. Older ones remain in the event log.
        keep_events: entries of the event log that stay at least, and at most about twice as many; None: all. With older
            ones go the results of the steps that they archived, if the agent defines `replan`: its steps have no end.
        save_every: seconds between two saves of a step's `progress`.
        wake_when_due: whether an idle session of the agent gets a turn when a commitment in its state falls due.
        identity: who the agent is, apart from its work, until `perdure identity set` stores another one; None for an
            agent without one.
        message_rounds: how often messages that come after the last step cause another plan; later ones stay unread.
        acknowledge_resume: whether a note for the user about an interruption is at the start of a session's answer, and
            in the brief; `TurnHandle.notice` has it in any case, and its default text is in the event `resumed`.
        resume_timeout: seconds that an agent with `on_resume="ask"` waits for a confirmation, before it continues.
        coherence: checks whether the agent still works on its goal.
    """

    state_type: ClassVar[type[AgentState]] = AgentState
    in_doubt: ClassVar[Literal["retry", "fail"]] = "retry"
    snapshot_every: ClassVar[int] = 50
    keep_steps: ClassVar[int | None] = 100
    keep_messages: ClassVar[int | None] = 500
    keep_events: ClassVar[int | None] = 10_000
    save_every: ClassVar[float] = 60.0
    wake_when_due: ClassVar[bool] = False
    identity: ClassVar[Identity | None] = None
    message_rounds: ClassVar[int] = 3
    acknowledge_resume: ClassVar[bool] = False
    resume_timeout: ClassVar[float] = 3600.0
    coherence: ClassVar[Coherence] = Coherence()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for base in cls.__dict__.get("__orig_bases__", ()):
            origin = get_origin(base)
            if isinstance(origin, type) and issubclass(origin, Agent):
                for argument in get_args(base):
                    if isinstance(argument, type) and issubclass(argument, AgentState):
                        cls.state_type = argument

    async def plan(self, ctx: Context, state: S) -> Plan | Sequence[PlanStep]:
        """Return the steps in the order in which to take them."""
        raise NotImplementedError(f"{type(self).__name__} has no plan")

    async def act(self, ctx: Context, state: S, step: PlanStep) -> Any:
        """Take one step. The result, JSON data or of the annotated return type, is put into `state.results`.

        If it is the handle of a task, the result of the step is that of the task, for which the agent is parked.

        Keys of `ctx.step` calls in this method are prefixed with the key of the step.
        """
        raise NotImplementedError(f"{type(self).__name__} has no act")

    async def finish(self, ctx: Context, state: S) -> Any:
        """Return the result of the task. Called when every step of the plan is closed.

        `state.results` has the results of archived steps, too; a change of one of these is not stored.
        """
        raise NotImplementedError(f"{type(self).__name__} has no finish")

    async def remember(self, ctx: Context, state: S) -> Sequence[NewMemory | str]:
        """Return memories to keep after this task, as texts or `NewMemory`. Called after `finish`.

        They are stored once in the long-term memory, under the agent's name, before the outcome is stored. An agent
        without this method remembers its discoveries: in a session those of the turn, about the session's id. It
        remembers nothing where tasks are encrypted; and a store that cannot be used is logged, and ends no task.
        """
        return ()

    async def replan(self, ctx: Context, state: S) -> Plan | Sequence[PlanStep] | None:
        """Return steps that replace the open ones, or None to keep the plan. Called after each step.

        Return `Plan(steps, why="...")` to tell the next prompts and the handoff document why the others were replaced.

        After a failed step `state.current` is its key and its `error` the cause; otherwise `state.current` is None. A
        failed step that is not among the new steps is given up. If the plan is kept, the task is retried with it.
        """
        return None

    async def on_resume(self, ctx: Context, resumption: Resumption) -> str | None:
        """Return what to say to the user when the agent resumes after an interruption; None for the default text.

        Called once per resume, before the next step. The text is in the conversation and in `TurnHandle.notice`, and
        with `acknowledge_resume` at the start of the answer of a session's turn.
        """
        return None

    async def verify(self, ctx: Context, state: S, step: PlanStep) -> AlreadyDone[Any] | None:
        """Find out whether a risky step that started and has no record took effect. Return its result, or None."""
        return None
