"""`perdure job`: list, show, watch, run, abort and remove jobs over many tasks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final

import anyio
import typer

from ...queues.jobs import JobPlan, JobStore, StoredJob
from ...queues.producer import Producer
from ...queues.runtime import RUNTIME
from .support.connection import connected, where
from .support.errors import Failed
from .support.jobs import JobName, command_runner, describe_counts, failure_of, follow, whose_turn
from .support.options import By, login
from .support.output import AsJson, Bar, Column, Time, note
from .support.runner import LiveListing, Output

app = typer.Typer(no_args_is_help=True, add_completion=False)

_LOOK: Final = 0.5
"""Seconds between two looks at a job that is watched."""


@app.callback()
def job() -> None:
    """List, show, watch, continue and abort jobs over many tasks.

    A job is made by a command that acts on many tasks: 'perdure task cancel
    --all', 'perdure queue purge', 'perdure dlq replay --all' and 'perdure dlq
    purge --all'. The command runs it; if it is interrupted or dies, a worker
    continues where it was.
    """


def _store(producer: Producer) -> JobStore:
    return JobStore(producer.gateway, producer.namespace)


@app.command("list")
@connected
async def list_(producer: Producer) -> LiveListing:
    """List jobs, the newest first, with what they have done.

    A job that has ended is kept for 30 days. "share" is the share of the
    tasks that it has looked at.

    Example: perdure job list
    """
    found = await _store(producer).read_all()
    return LiveListing(_COLUMNS, found, empty=f"there is no job {where(producer)}")


def _share(stored: StoredJob) -> str | None:
    total, read = stored.total, stored.counts.read
    if stored.state == "done":
        return "100 %"
    return None if not total else f"{min(1.0, read / total):.0%}".replace("%", " %")


def _state(stored: StoredJob) -> str:
    """Return the state, and that no process runs an open job now."""
    return "waiting" if stored.running and stored.runner is None else stored.state


def _what(stored: StoredJob) -> str:
    """Return the filter in the form of options."""
    plan = stored.shown_plan()
    if not isinstance(plan, JobPlan):
        return plan
    words = [] if plan.queue is None else [f"--queue {plan.queue}"]
    for name, value in plan.filter.items():
        if name in ("since", "until"):
            continue
        option = {"states": "state", "tags": "tag"}.get(name, name)
        words += [f"--{option} {one}" for one in (value if isinstance(value, list) else [value])]
    return " ".join(words) or "all"


_COLUMNS: Final[Sequence[Column[StoredJob]]] = (
    Column("job", lambda stored: stored.name, least=16, fold=True),
    Column("act", lambda stored: stored.act),
    Column("state", _state),
    Column("filter", _what, least=8),
    Column("share", _share, right=True),
    Column("done", lambda stored: f"{stored.counts.done:,}", right=True),
    Column("skipped", lambda stored: f"{stored.counts.skipped:,}", right=True),
    Column("failed", lambda stored: f"{stored.counts.failed:,}", right=True),
    Column("created", lambda stored: Time(stored.number("at"))),
    Column("by", lambda stored: stored.text("by"), wide=True),
    Column("runner", lambda stored: stored.runner, wide=True),
)


@app.command()
@connected
async def show(producer: Producer, name: JobName) -> Output:
    """Show a job: its filter, what it has done, and the tasks that failed.

    Example: perdure job show nightly-clean-up
    """
    stored = await _store(producer).find(name)
    summary, counts = stored.summary(), stored.counts
    hint = await whose_turn(producer, name) if stored.running and stored.runner is None else None
    options = ", ".join(f"{key}: {value}" for key, value in (summary["options"] or {}).items() if value)
    until = stored.shown_plan()
    bound = until.filter.get("until") if isinstance(until, JobPlan) else None
    return Output(
        summary,
        {
            "job": stored.name,
            "act": stored.act,
            "state": _state(stored),
            "filter": _what(stored),
            "until": Time(bound if isinstance(bound, int) else None),
            "options": options or None,
            "rate": None if stored.rate is None else f"{stored.rate:g}/s",
            "by": stored.text("by") or None,
            "why": stored.text("why") or None,
            "created": Time(stored.number("at")),
            "ended": Time(stored.number("ended") or None),
            "aborted by": stored.text("aborted_by") or None,
            "runner": stored.runner,
            "looked at": f"{counts.read:,}" + ("" if stored.total is None else f" of {stored.total:,}"),
            "done": f"{counts.done:,}",
            "skipped": f"{counts.skipped:,}" if counts.skipped else None,
            "failed": f"{counts.failed:,}" if counts.failed else None,
            "failures": [f"{one.task_id} (queue {one.queue}): {one.reason}" for one in counts.errors],
            "problem": stored.text("problem") or None,
        },
        notes=[hint],
    )


@app.command()
@connected
async def watch(producer: Producer, name: JobName, *, json: AsJson = False) -> Output:
    """Follow a job until it ends; Ctrl-C leaves it running.

    Exits with 1 if tasks failed, or it was aborted.

    Example: perdure job watch nightly-clean-up
    """
    store = _store(producer)
    stored, told = await store.find(name), RUNTIME.monotonic()
    with Bar(stored.act, stored.total, rest=None) as bar:
        while stored.running:
            bar.total = stored.total
            bar.advance(stored.counts.read - bar.done)
            if stored.runner is None and RUNTIME.monotonic() - told > _PATIENCE:
                told = RUNTIME.monotonic()
                note(await whose_turn(producer, name))
                if stored.text("problem"):
                    note(f"the last one could not run it: {stored.text('problem')}")
            await anyio.sleep(_LOOK)
            stored = await store.find(name)
    return Output(stored.summary() if json else None, notes=describe_counts(stored), failure=failure_of(stored))


_PATIENCE: Final = 10.0
"""Seconds after which a watched job without a runner is explained."""


@app.command()
@connected
async def run(producer: Producer, name: JobName) -> AsyncIterator[Output]:
    """Continue a job that no process runs, and print the ids of its tasks.

    Workers do so by themselves within seconds. Use it if no worker runs, or
    if their user has not the rights.

    Example: perdure job run nightly-clean-up
    """
    stored = await _store(producer).find(name)
    if not stored.running:
        raise Failed(f"job {name} has ended: it is {stored.state}")
    if stored.runner is not None:
        raise Failed(f"{stored.runner} runs job {name} now; 'perdure job watch {name}' follows it")
    async for output in follow(producer, command_runner(producer), stored):
        yield output


@app.command()
@connected
async def abort(producer: Producer, name: JobName, *, by: By = None) -> Output:
    """End a job before it is complete, and print its name.

    What it has done stays. Its runner stops after the tasks in hand, at most
    some hundred.

    Example: perdure job abort nightly-clean-up
    """
    stored = await _store(producer).abort(name, by=login() if by is None else by)
    return Output(stored.summary(), name, notes=describe_counts(stored))


@app.command()
@connected
async def remove(producer: Producer, name: JobName) -> Output:
    """Remove a job that has ended from the list, and print its name.

    Example: perdure job remove nightly-clean-up
    """
    await _store(producer).remove(name)
    return Output({"name": name, "removed": True}, name)
