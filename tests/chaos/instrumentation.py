"""Journal calls of the handlers: their runs, the steps they start, the values they get.

A step's value is a token that names the execution that made it, `run/step/number`; so a token identifies the
run that made it. In a large value, padding follows after a space. A run is `pid.number`, unique on the machine while
the journal is written.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import anyio
from perdure import Context, Retry, SyncContext, current_step
from perdure.queues.delivery.leases import Delivery
from perdure.worker.durable.run import Run
from perdure.worker.durable.steps.current import CURRENT_RUN

from .journal import JournalWriter
from .kinds import KINDS

__all__ = [
    "FOLDER",
    "JOURNAL",
    "PADDING",
    "began",
    "effect",
    "got",
    "logged",
    "logged_plain",
    "logged_run",
    "made",
    "options_of",
    "replays",
    "returned",
    "running",
    "stepped",
    "stepped_plain",
    "token_of",
    "work",
]

P = ParamSpec("P")
R = TypeVar("R")

FOLDER: Final = Path(os.environ.get("CHAOS_FOLDER", "."))
"""Folder of the journal."""

JOURNAL: Final = JournalWriter(FOLDER)

PADDING: Final = 1_100_000
"""Characters in a large value, which is stored in three chunks."""

_RUNS: Final[dict[int, str]] = {}
"""Names of the runs in this process, by identity: a run after lost data has the fencing token of the last one."""

_NUMBERS = itertools.count(1)


def options_of(kind: str) -> dict[str, Any]:
    """Return the options of the task of a kind."""
    own = KINDS[kind]
    retry = Retry(max_attempts=own.attempts, max_crashes=own.crashes, base=0.1, cap=1.0)
    return {"name": kind, "queue": own.queue, "retry": retry}


def logged(
    handler: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Context, P], Coroutine[Any, Any, R]]:
    """Log each run of a handler: its delivery, and how it ended."""

    async def run(ctx: Context, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with logged_run(ctx) as name:
            result = await handler(ctx, *args, **kwargs)
        returned(ctx, name, result)
        return result

    functools.update_wrapper(run, handler)  # the signature is what a task's arguments are read from
    return run


def logged_plain(handler: Callable[Concatenate[SyncContext, P], R]) -> Callable[Concatenate[SyncContext, P], R]:
    """Log each run of a handler that is a plain function."""

    def run(ctx: SyncContext, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with logged_run(ctx) as name:
            result = handler(ctx, *args, **kwargs)
        returned(ctx, name, result)
        return result

    functools.update_wrapper(run, handler)
    return run


def returned(ctx: Context | SyncContext, run: str, result: Any) -> None:
    """Log the result of a run."""
    JOURNAL.write("returned", task=ctx.task_id, run=run, result=result)


@contextmanager
def logged_run(ctx: Context | SyncContext) -> Iterator[str]:
    """Log the run of a task, and how it ended if it returned nothing, and yield its name."""
    name, current = f"{os.getpid()}.{next(_NUMBERS)}", _current()
    _RUNS[id(current)] = name
    JOURNAL.write(
        "run",
        task=ctx.task_id,
        kind=ctx.task,
        run=name,
        attempt=ctx.attempt,
        crashes=ctx.crashes,
        **_shown(current.delivery),
    )
    try:
        yield name
    except BaseException as error:
        JOURNAL.write("left", task=ctx.task_id, run=name, error=type(error).__name__, text=str(error)[:200])
        raise
    finally:
        del _RUNS[id(current)]


def _current() -> Run:
    run = CURRENT_RUN.get()
    assert run is not None
    return run


def _shown(delivery: Delivery) -> dict[str, Any]:
    """Return the fencing token of a delivery, which orders the runs of a task without a clock."""
    return {
        "queue": delivery.partition.queue,
        "partition": delivery.partition.index,
        "entry": delivery.entry.decode(),
        "count": delivery.count,
        "worker": delivery.worker,
    }


def running() -> str:
    """Return the name of the current run."""
    return _RUNS[id(_current())]


def replays() -> int:
    """Return how often the dead letter of the current task was replayed."""
    return _current().history.replays


def began(inputs: list[str]) -> str:
    """Log the start of a step's function; return the token that it will make."""
    step = current_step()
    task, _, key = step.idempotency_key.partition(":")
    run = running()
    token = f"{run}/{key}/{step.attempt}"
    JOURNAL.write("begin", task=task, run=run, step=key, trial=step.attempt, token=token, inputs=inputs)
    return token


def effect(token: str, what: str = "effect", **more: object) -> None:
    """Log the effect of the step, or another event of it."""
    run, _, rest = token.partition("/")
    key, _, _ = rest.rpartition("/")
    JOURNAL.write(what, task=current_step().idempotency_key.partition(":")[0], run=run, step=key, token=token, **more)


def made(token: str) -> str:
    """Log the effect of the step, and return its token."""
    effect(token)
    return token


async def work(inputs: list[str], pause: float) -> str:
    """Do the work of a step: nothing, for so many seconds."""
    token = began(inputs)
    await anyio.sleep(pause)
    return made(token)


async def stepped(ctx: Context, name: str, fn: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Call `ctx.step`, and log the value that the handler gets. Names are used once per run, so they are the keys."""
    value: str = await ctx.options(**options).step(name, fn, *args)
    return got(ctx, name, value, options.get("durability", "sync"))


def stepped_plain(ctx: SyncContext, name: str, fn: Callable[..., Any], *args: Any) -> str:
    """Call `ctx.step` in a handler that is a plain function."""
    value: str = ctx.step(name, fn, *args)
    return got(ctx, name, value, "sync")


def got(ctx: Context | SyncContext, name: str, value: str, durability: str) -> str:
    """Log the value of a step that the handler got; return its token."""
    token = token_of(value)
    JOURNAL.write("value", task=ctx.task_id, run=running(), step=name, token=token, durability=durability)
    return token


def token_of(value: str) -> str:
    """Return the token in a step's value. Raises `ValueError` if a large value is incomplete."""
    token, mark, padding = value.partition(" ")
    if mark and len(padding) != PADDING:
        raise ValueError(f"{len(padding)} characters of padding after {token}")
    return token
