"""Journal calls of the handlers: their runs, the steps they start, the values they get.

A step's value is a token that names the execution that made it, `run/step/number`; so a token identifies the
run that made it. A run is `pid.number`, unique on the machine while the journal is written.
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

from .journal import JournalWriter

__all__ = ["FOLDER", "JOURNAL", "began", "effect", "logged", "made", "running", "stepped"]

P = ParamSpec("P")
R = TypeVar("R")

FOLDER: Final = Path(os.environ.get("CHAOS_FOLDER", "."))
"""Folder of the journal."""

JOURNAL: Final = JournalWriter(FOLDER)

_RUN: ContextVar[str] = ContextVar("chaos_run")
_NUMBERS = itertools.count(1)


def logged(
    handler: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Context, P], Coroutine[Any, Any, R]]:
    """Log each run of a handler: its delivery, and how it ended."""

    async def run(ctx: Context, /, *args: P.args, **kwargs: P.kwargs) -> R:
        name = f"{os.getpid()}.{next(_NUMBERS)}"
        token = _RUN.set(name)
        delivery = _delivery()
        JOURNAL.write(
            "run", task=ctx.task_id, kind=ctx.task, run=name, attempt=ctx.attempt, crashes=ctx.crashes, **delivery
        )
        try:
            result = await handler(ctx, *args, **kwargs)
        except BaseException as error:
            JOURNAL.write("left", task=ctx.task_id, run=name, error=type(error).__name__, text=str(error)[:200])
            raise
        finally:
            _RUN.reset(token)
        JOURNAL.write("returned", task=ctx.task_id, run=name, result=result)
        return result

    functools.update_wrapper(run, handler)  # the signature is what a task's arguments are read from
    return run


def _delivery() -> dict[str, Any]:
    """Return the fencing token of the delivery, which orders the runs of a task without a clock."""
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
    """Return the name of the current run."""
    return _RUN.get()


def began(inputs: list[str]) -> str:
    """Log the start of a step's function; return the token that it will make."""
    step = current_step()
    task, _, key = step.idempotency_key.partition(":")
    token = f"{_RUN.get()}/{key}/{step.attempt}"
    JOURNAL.write("begin", task=task, run=_RUN.get(), step=key, trial=step.attempt, token=token, inputs=inputs)
    return token


def effect(token: str, what: str = "effect", **more: object) -> None:
    """Log the effect of the step, or another event of it."""
    run, key, _ = token.split("/")
    JOURNAL.write(what, task=current_step().idempotency_key.partition(":")[0], run=run, step=key, token=token, **more)


def made(token: str) -> str:
    """Log the effect of the step, and return its token."""
    effect(token)
    return token


async def stepped(ctx: Context, name: str, fn: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Call `ctx.step`, and log the value that the handler gets. Names are used once per run, so they are the keys."""
    value: str = await ctx.options(**options).step(name, fn, *args)
    durability = options.get("durability", "sync")
    JOURNAL.write("value", task=ctx.task_id, run=_RUN.get(), step=name, token=value, durability=durability)
    return value
