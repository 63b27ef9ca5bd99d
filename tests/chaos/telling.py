"""How a handler of the run tells the journal what it does: its runs, the steps it begins, the values it gets.

A step's value is a token that names the execution that made it, `run/step/number`; whoever sees a token knows whose
work it is. A run is `pid.number`, unique on the machine while the journal is written.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from perdure import Context, current_step
from perdure.worker.durable import CURRENT_RUN

from .journal import Pen

__all__ = ["FOLDER", "PEN", "began", "effect", "made", "running", "stepped", "told"]

P = ParamSpec("P")
R = TypeVar("R")

FOLDER: Final = Path(os.environ.get("CHAOS_FOLDER", "."))
"""Where the journal of the run is."""

PEN: Final = Pen(FOLDER)

_RUN: ContextVar[str] = ContextVar("chaos_run")
_NUMBERS = itertools.count(1)


def told(
    handler: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Context, P], Coroutine[Any, Any, R]]:
    """Tell of each run of a handler: its delivery, and how it ended."""

    async def run(ctx: Context, /, *args: P.args, **kwargs: P.kwargs) -> R:
        name = f"{os.getpid()}.{next(_NUMBERS)}"
        token = _RUN.set(name)
        delivery = _delivery()
        PEN.note("run", task=ctx.task_id, kind=ctx.task, run=name, attempt=ctx.attempt, crashes=ctx.crashes, **delivery)
        try:
            result = await handler(ctx, *args, **kwargs)
        except BaseException as error:
            PEN.note("left", task=ctx.task_id, run=name, error=type(error).__name__, text=str(error)[:200])
            raise
        finally:
            _RUN.reset(token)
        PEN.note("returned", task=ctx.task_id, run=name, result=result)
        return result

    functools.update_wrapper(run, handler)  # the signature is what a task's arguments are read from
    return run


def _delivery() -> dict[str, Any]:
    """The fence of the delivery: which of several runs of a task came later, no clock tells so surely."""
    run = CURRENT_RUN.get()
    assert run is not None
    delivery = run.delivery
    return {
        "queue": delivery.partition.queue,
        "partition": delivery.partition.index,
        "entry": delivery.entry.decode(),
        "count": delivery.count,
        "worker": delivery.worker,
    }


def running() -> str:
    """The name of the run that this is part of."""
    return _RUN.get()


def began(inputs: list[str]) -> str:
    """A step's function begins: returns the token that it will make."""
    step = current_step()
    task, _, key = step.idempotency_key.partition(":")
    token = f"{_RUN.get()}/{key}/{step.attempt}"
    PEN.note("begin", task=task, run=_RUN.get(), step=key, trial=step.attempt, token=token, inputs=inputs)
    return token


def effect(token: str, what: str = "effect") -> None:
    """The step's effect happened, or `what` else it tells of."""
    run, key, _ = token.split("/")
    PEN.note(what, task=current_step().idempotency_key.partition(":")[0], run=run, step=key, token=token)


def made(token: str) -> str:
    """The step's function is done: its effect has happened."""
    effect(token)
    return token


async def stepped(ctx: Context, name: str, fn: Callable[..., Any], *args: Any, **options: Any) -> str:
    """`ctx.step`, and its value told as the handler gets it. Names are used once per run, so they are the keys."""
    value: str = await ctx.step(name, fn, *args, **options)
    durability = options.get("durability", "sync")
    PEN.note("value", task=ctx.task_id, run=_RUN.get(), step=name, token=value, durability=durability)
    return value
