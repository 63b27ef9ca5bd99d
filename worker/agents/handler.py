"""Task handler of an agent: an async function of the goal and the agent's inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Final, get_type_hints

from ...queues.pubsub import TaskNotifications
from ..context import Context
from ..durable.steps.current import CURRENT_RUN
from ..errors import StepOutsideTask, TaskDefinitionError
from .agent import Agent
from .coherence.findings import check_coherence
from .incoming import OnMessage
from .live_state import LiveState
from .loop import Loop
from .resume_notice import OnResume
from .session_turn import SessionTurn
from .state_type import StateType

Handler = Callable[..., Coroutine[Any, Any, Any]]

_ON_MESSAGE: Final = ("next_step", "interrupt", "restart")


def make_handler(
    kind: type[Agent[Any]],
    state_type: StateType[Any],
    *,
    on_message: OnMessage = "next_step",
    on_resume: OnResume = None,
    replicated: bool = False,
    check: Callable[[], bool],
    notifications: Callable[[], TaskNotifications],
) -> Handler:
    """Return an async function that runs the agent.

    Args:
        on_message: what a message to a running agent causes, see `App.agent`.
        on_resume: what the agent does after an involuntary stop, see `App.agent`.
        replicated: whether a step of the plan is done only when Redis replicas have its record.
        check: returns whether states are compared with the reduction of their logs.
        notifications: returns the notifications of tasks, while the app is open.

    Raises:
        TaskDefinitionError: `kind` is not a usable subclass of `Agent`.
    """
    _check(kind, state_type.agent)
    if on_message not in (None, *_ON_MESSAGE):
        shown = ", ".join(map(repr, _ON_MESSAGE))
        raise TaskDefinitionError(f"agent {state_type.agent!r}: on_message must be {shown} or None, got {on_message!r}")
    if on_resume not in (None, "ask"):
        raise TaskDefinitionError(f"agent {state_type.agent!r}: on_resume must be 'ask' or None, got {on_resume!r}")

    async def handler(ctx: Context, goal: str, **inputs: Any) -> Any:
        run = CURRENT_RUN.get()
        if run is None or run.id != ctx.task_id or run.envelope.task != state_type.agent:
            raise StepOutsideTask(f"agent {state_type.agent!r} cannot be called in another task; enqueue it")
        live = LiveState(
            run,
            state_type,
            snapshot_every=kind.snapshot_every,
            keep_steps=kind.keep_steps,
            keep_messages=kind.keep_messages,
            keep_events=kind.keep_events,
            check=check(),
        )
        agent = kind()
        options: dict[str, Any] = {"on_message": on_message, "on_resume": on_resume, "replicated": replicated}
        loop = Loop(agent, ctx, live, notifications, **options)
        turn = SessionTurn.of(run, agent, state_type)
        return await (loop.drive(goal, inputs) if turn is None else _take_turn(turn, loop, live, goal, inputs))

    parameters = {"ctx": Context, "goal": str, **{name: state_type.annotation(name) for name in state_type.inputs}}
    handler.__name__ = handler.__qualname__ = state_type.agent
    handler.__doc__ = kind.__doc__
    handler.__annotations__ = {**parameters, "return": _returned(kind)}
    handler.__signature__ = _signature(parameters, state_type)  # type: ignore[attr-defined]  # inspect.signature reads it
    return handler


async def _take_turn(
    turn: SessionTurn[Any], loop: Loop[Any], live: LiveState[Any], goal: str, inputs: dict[str, Any]
) -> Any:
    """Run the agent for one turn of a session. Its end is stored after the result is recorded, and is repeatable."""
    await live.run.history.read_all()
    if not loop.has_finished and (carried := await turn.begin()) is not None:
        live.carried, goal = carried, carried.goal
    result = await loop.drive(goal, inputs)
    if turn.is_own and live.number == 0:  # an earlier run recorded the result: its state has not been restored
        await live.open(goal, inputs)
    await turn.end(live.logged_state if turn.is_own else None, result)
    return result


def _signature(parameters: dict[str, Any], state_type: StateType[Any]) -> inspect.Signature:
    """Return the signature of `async def handler(ctx, goal, *, ...)`; inputs with a default are optional."""
    found = []
    for name, annotation in parameters.items():
        is_input = name in state_type.inputs
        found.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY if is_input else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=None if is_input and not state_type.fields[name].is_required() else inspect.Parameter.empty,
                annotation=annotation,
            )
        )
    return inspect.Signature(found)


def _check(kind: object, name: str) -> None:
    if not isinstance(kind, type) or not issubclass(kind, Agent):
        raise TaskDefinitionError(f"agent {name!r} must be a subclass of Agent, got {kind!r}")
    for method in ("plan", "act", "finish"):
        if getattr(kind, method) is getattr(Agent, method):
            raise TaskDefinitionError(f"agent {name!r} has no {method}; define 'async def {method}'")
    for method in ("plan", "act", "finish", "replan", "verify", "remember", "on_resume"):
        if not inspect.iscoroutinefunction(getattr(kind, method)):
            raise TaskDefinitionError(f"agent {name!r}: {method} must be an 'async def'")
    if kind.snapshot_every < 1 or kind.save_every <= 0:
        raise TaskDefinitionError(f"agent {name!r}: snapshot_every must be 1 or more, save_every more than 0 seconds")
    if not kind.resume_timeout > 0:
        raise TaskDefinitionError(
            f"agent {name!r}: resume_timeout must be more than 0 seconds, got {kind.resume_timeout!r}"
        )
    if any(keep is not None and keep < 1 for keep in (kind.keep_steps, kind.keep_messages, kind.keep_events)):
        raise TaskDefinitionError(
            f"agent {name!r}: keep_steps, keep_messages and keep_events must be 1 or more, or None"
        )
    if type(kind.message_rounds) is not int or kind.message_rounds < 0:
        raise TaskDefinitionError(f"agent {name!r}: message_rounds must be 0 or more, got {kind.message_rounds!r}")
    if kind.in_doubt not in ("retry", "fail"):
        raise TaskDefinitionError(f"agent {name!r}: in_doubt must be 'retry' or 'fail', got {kind.in_doubt!r}")
    check_coherence(f"agent {name!r}", kind.coherence)
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise TaskDefinitionError(f"agent {name!r}: its class must be callable without arguments: {error}") from None


def _returned(kind: type[Agent[Any]]) -> Any:
    """Return the return annotation of `finish`, `Any` if it cannot be resolved."""
    try:
        return get_type_hints(kind.finish, include_extras=True).get("return", Any)
    except (NameError, TypeError):
        return Any
