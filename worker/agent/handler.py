"""The handler of an agent's task: an async function whose arguments are the goal and the agent's inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints

from ..durable import CURRENT_RUN, Context
from ..errors import StepOutsideTask, TaskDefinitionError
from .agent import Agent
from .live_state import LiveState
from .loop import Loop
from .state_type import StateType

__all__ = ["make_handler"]

Handler = Callable[..., Coroutine[Any, Any, Any]]


def make_handler(
    kind: type[Agent[Any]], form: StateType[Any], *, replicated: bool = False, check: Callable[[], bool]
) -> Handler:
    """An async function that runs the agent.

    replicated: a step of the plan is done when replicas know it. check: whether states are compared with what their
    logs come to.

    Raises `TaskDefinitionError` for a class that is no agent.
    """
    _check(kind, form.agent)

    async def handler(ctx: Context, goal: str, **inputs: Any) -> Any:
        run = CURRENT_RUN.get()
        if run is None or run.id != ctx.task_id or run.envelope.task != form.agent:
            raise StepOutsideTask(f"agent {form.agent!r} runs as a task of its own: enqueue it")
        session = LiveState(run, form, snapshot_every=kind.snapshot_every, check=check())
        return await Loop(kind(), ctx, session, replicated=replicated).drive(goal, inputs)

    parameters = {"ctx": Context, "goal": str, **{name: form.annotation(name) for name in form.inputs}}
    handler.__name__ = handler.__qualname__ = form.agent
    handler.__doc__ = kind.__doc__
    handler.__annotations__ = {**parameters, "return": _returned(kind)}
    handler.__signature__ = _signature(parameters, form)  # type: ignore[attr-defined]  # inspect.signature reads it
    return handler


def _signature(parameters: dict[str, Any], form: StateType[Any]) -> inspect.Signature:
    """That of `async def handler(ctx, goal, *, ...)`; inputs with a default may be left out."""
    found = []
    for name, annotation in parameters.items():
        own = name in form.inputs
        found.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY if own else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=None if own and not form.fields[name].is_required() else inspect.Parameter.empty,
                annotation=annotation,
            )
        )
    return inspect.Signature(found)


def _check(kind: object, name: str) -> None:
    if not isinstance(kind, type) or not issubclass(kind, Agent):
        raise TaskDefinitionError(f"agent {name!r} must be a subclass of Agent, and {kind!r} is none")
    for method in ("plan", "act", "finish"):
        if getattr(kind, method) is getattr(Agent, method):
            raise TaskDefinitionError(f"agent {name!r} has no {method}: define 'async def {method}'")
    for method in ("plan", "act", "finish", "replan", "verify", "remember"):
        if not inspect.iscoroutinefunction(getattr(kind, method)):
            raise TaskDefinitionError(f"agent {name!r}: its {method} must be an 'async def'")
    if kind.snapshot_every < 1 or kind.save_every <= 0:
        raise TaskDefinitionError(f"agent {name!r}: snapshot_every must be 1 or more, save_every more than 0 seconds")
    if kind.in_doubt not in ("retry", "fail"):
        raise TaskDefinitionError(f"agent {name!r}: in_doubt must be 'retry' or 'fail', not {kind.in_doubt!r}")
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise TaskDefinitionError(f"agent {name!r}: its class is called without arguments: {error}") from None


def _returned(kind: type[Agent[Any]]) -> Any:
    """What `finish` returns, as far as its annotation can be resolved."""
    try:
        return get_type_hints(kind.finish, include_extras=True).get("return", Any)
    except (NameError, TypeError):
        return Any
