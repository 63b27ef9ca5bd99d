"""Application of the run: tasks of every kind, which log to the journal what they do.

Workers of two versions load this module, so it uses names that both have. `perdure worker run tests.chaos.app:app`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import anyio
import perdure
from perdure import AlreadyDone, App, Context, Retry, Snooze, SyncContext, current_step

from .agents import ChaosAgent, RunLog
from .children import register_children
from .instrumentation import (
    FOLDER,
    JOURNAL,
    PADDING,
    began,
    effect,
    logged,
    logged_plain,
    made,
    options_of,
    running,
    stepped,
    stepped_plain,
    work,
)
from .journal import SECOND
from .limits import register_limits
from .sessions import register_listener
from .spending import register_spending
from .streaming import register_streaming
from .waiting import register_waiting

app = App("chaos", middleware=[RunLog()])

_STALL = 0.5
"""Seconds of a standstill of this process that are logged."""


def labour(inputs: list[str], pause: float) -> str:
    """Do the same work in a thread."""
    token = began(inputs)
    time.sleep(pause)
    return made(token)


@app.task(**options_of("chain"))
@logged
async def chain(ctx: Context, steps: int, pause: float) -> list[str]:
    """Steps that build on each other, each recorded before the next begins."""
    found: list[str] = []
    for number in range(steps):
        found.append(await stepped(ctx, f"step-{number}", work, list(found), pause))
    return found


@app.task(**options_of("hasty"))
@logged
async def hasty(ctx: Context, steps: int, pause: float) -> list[str]:
    """Steps recorded in the background, every third before the next begins."""
    found: list[str] = []
    for number in range(steps):
        durability = "sync" if number % 3 == 2 else "async"
        found.append(await stepped(ctx, f"step-{number}", work, list(found), pause, durability=durability))
    return found


@app.task(**options_of("threads"))
@logged
async def threads(ctx: Context, steps: int, pause: float) -> list[str]:
    """Steps that are not async."""
    found: list[str] = []
    for number in range(steps):
        found.append(await stepped(ctx, f"step-{number}", labour, list(found), pause))
    return found


@app.task(**options_of("plain"))
@logged_plain
def plain(ctx: SyncContext, steps: int, pause: float) -> list[str]:
    """A handler that is a plain function, with steps of both kinds."""
    found: list[str] = []
    for number in range(steps):
        found.append(stepped_plain(ctx, f"step-{number}", work if number % 2 else labour, list(found), pause))
    return found


async def bulk(inputs: list[str], pause: float) -> str:
    return f"{await work(inputs, pause)} {'x' * PADDING}"


@app.task(**options_of("bulky"))
@logged
async def bulky(ctx: Context, steps: int, pause: float) -> list[str]:
    """Steps with large results, which are stored in chunks."""
    found: list[str] = []
    for number in range(steps):
        found.append(await stepped(ctx, f"step-{number}", bulk, list(found), pause))
    return found


@app.task(**options_of("fans"))
@logged
async def fans(ctx: Context, steps: int, pause: float) -> list[str]:
    """Steps at the same time, and one that takes what all have made."""
    found: dict[int, str] = {}

    async def one(number: int) -> None:
        found[number] = await stepped(ctx, f"ray-{number}", work, [], pause * (1 + number / steps))

    async with anyio.create_task_group() as group:
        for number in range(steps):
            group.start_soon(one, number)
    rays = [found[number] for number in range(steps)]
    return [*rays, await stepped(ctx, "together", work, rays, pause)]


async def flaky(inputs: list[str], pause: float, failures: int) -> str:
    token = began(inputs)
    await anyio.sleep(pause)
    if current_step().attempt <= failures:
        effect(token, "raised")
        raise ValueError("a step that fails, and is tried again within its run")
    return made(token)


@app.task(**options_of("tries"))
@logged
async def tries(ctx: Context, steps: int, pause: float) -> list[str]:
    """Steps that are tried again within the run."""
    found: list[str] = []
    again = Retry(max_attempts=3, base=0.05)
    for number in range(steps):
        found.append(await stepped(ctx, f"step-{number}", flaky, list(found), pause, number % 3, retry=again))
    return found


async def piecework(inputs: list[str], pause: float, pieces: int) -> str:
    """Save the number of finished pieces after each one, and continue after the last that was saved."""
    token = began(inputs)
    step = current_step()
    finished = step.saved or 0
    effect(token, "found", pieces=finished)
    while finished < pieces:
        await anyio.sleep(pause / 2)
        finished += 1
        await step.save(finished)
        effect(token, "saved", pieces=finished)
    return made(token)


@app.task(**options_of("saves"))
@logged
async def saves(ctx: Context, steps: int, pause: float) -> list[str]:
    """A step that saves its progress, and one that is recorded after it."""
    first = await stepped(ctx, "pieces", piecework, [], pause, 4 * steps)
    return [first, await stepped(ctx, "last", work, [first], pause)]


async def charge(inputs: list[str], pause: float) -> str:
    """Have an effect outside Redis: a line in the ledger."""
    token = began(inputs)
    await anyio.sleep(pause / 2)
    with _ledger().open("a") as ledger:
        ledger.write(f"{token}\n")
    effect(token)
    await anyio.sleep(pause / 2)
    return token


def find_charge(inputs: list[str], pause: float) -> AlreadyDone[str] | None:
    step = current_step()
    task, _, key = step.idempotency_key.partition(":")
    ledger = _ledger()
    JOURNAL.write("verifies", task=task, run=running(), step=key, found=ledger.exists())
    return AlreadyDone(ledger.read_text().splitlines()[0]) if ledger.exists() else None


def _ledger() -> Path:
    return FOLDER / "ledger" / current_step().idempotency_key.replace(":", "-")


@app.task(**options_of("payment"))
@logged
async def payment(ctx: Context, steps: int, pause: float) -> list[str]:
    """A risky step that can find out whether it acted already."""
    order = await stepped(ctx, "order", work, [], pause)
    charged = await stepped(ctx, "charge", charge, [order], pause, risky=True, verify=find_charge)
    return [order, charged, await stepped(ctx, "receipt", work, [order, charged], pause)]


@app.task(**options_of("doubtful"))
@logged
async def doubtful(ctx: Context, steps: int, pause: float) -> list[str]:
    """A risky step that is left to a person rather than done twice."""
    order = await stepped(ctx, "order", work, [], pause)
    charged = await stepped(ctx, "charge", charge, [order], pause, risky=True, in_doubt="fail")
    return [order, charged]


@app.task(**options_of("stumbles"))
@logged
async def stumbles(ctx: Context, steps: int, pause: float) -> list[str]:
    """Fails at first, and keeps its checkpoint from attempt to attempt."""
    found: list[str] = []
    for number in range(steps):
        found.append(await stepped(ctx, f"step-{number}", work, list(found), pause))
        if number < ctx.attempt < 3:
            raise ValueError(f"attempt {ctx.attempt} fails")
    return found


@app.task(**options_of("dozes"))
@logged
async def dozes(ctx: Context, steps: int, pause: float) -> list[str]:
    """Sleeps without a slot between its steps."""
    rested = ctx.resumed
    found = [await stepped(ctx, "step-0", work, [], pause)]
    if not rested:
        raise Snooze(pause * 2)
    found.append(await stepped(ctx, "step-1", work, list(found), pause))
    return found


@app.task(**options_of("fails"))
@logged
async def fails(ctx: Context, steps: int, pause: float) -> list[str]:
    """Fails in each attempt."""
    await stepped(ctx, "step-0", work, [], pause)
    raise ValueError("as it always does")


async def endless(inputs: list[str]) -> str:
    began(inputs)
    await anyio.sleep_forever()
    raise AssertionError


@app.task(**options_of("overtime"), timeout=0.8)
@logged
async def overtime(ctx: Context, steps: int, pause: float) -> list[str]:
    """Exceeds its time limit."""
    first = await stepped(ctx, "step-0", work, [], pause)
    return [first, await stepped(ctx, "endless", endless, [first])]


@app.task(**options_of("fragile"))
@logged
async def fragile(ctx: Context, steps: int, pause: float) -> list[str]:
    """Does no harm, and is given up after its second crash."""
    found: list[str] = []
    for number in range(steps):
        found.append(await stepped(ctx, f"step-{number}", work, list(found), pause))
    return found


async def suicide(inputs: list[str]) -> str:
    token = began(inputs)
    await anyio.sleep(0.05)
    effect(token, "kills")
    os.kill(os.getpid(), signal.SIGKILL)
    await anyio.sleep_forever()
    raise AssertionError


@app.task(**options_of("poison"))
@logged
async def poison(ctx: Context, steps: int, pause: float) -> list[str]:
    """Kills its process in its second step, with all other tasks that run there."""
    first = await stepped(ctx, "step-0", work, [], pause)
    return [first, await stepped(ctx, "suicide", suicide, [first])]


@app.task(**options_of("keyed"))
@logged
async def keyed(ctx: Context, steps: int, pause: float) -> list[str]:
    """One of a key's tasks."""
    return [await stepped(ctx, "step-0", work, [], pause)]


app.agent(ChaosAgent, **options_of("agent"), result_ttl=None)
register_listener(app)
register_waiting(app)
register_children(app)
register_streaming(app)
register_limits(app)
register_spending(app)


def _log_stalls() -> None:
    """Log each standstill of this process: frozen, or without processor time."""
    last = time.monotonic_ns()
    while True:
        time.sleep(0.1)
        now = time.monotonic_ns()
        if now - last > _STALL * SECOND:
            JOURNAL.write("stalled", since=last)
        last = now


if "CHAOS_ROLE" in os.environ:
    JOURNAL.write(
        "process",
        role=os.environ["CHAOS_ROLE"],
        version=os.environ.get("CHAOS_VERSION", "this"),
        package=str(Path(perdure.__file__).parent),
        parent=os.getppid(),
    )
    threading.Thread(target=_log_stalls, name="chaos stalls", daemon=True).start()
