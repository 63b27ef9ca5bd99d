"""The app of the tests and its tasks. SHOP_JOURNAL is a file that gets a line for each call of a function."""

from __future__ import annotations

import os
import time
from pathlib import Path

from django.tasks import TaskContext, task
from perdure import App, Context
from perdure.integrations.django import DjangoOutbox

app = App("shop", outbox=DjangoOutbox(poll=0.05))


def note(line: str) -> None:
    """Append a line to the journal, in one write."""
    with Path(os.environ["SHOP_JOURNAL"]).open("a") as journal:
        journal.write(f"{line}\n")


def lines() -> list[str]:
    """Return the lines of the journal."""
    journal = Path(os.environ["SHOP_JOURNAL"])
    return journal.read_text().splitlines() if journal.exists() else []


@app.task
async def invoice(ctx: Context, order: int) -> int:
    note(f"invoice {order}")
    return order * 100


@task
def add(first: int, second: int) -> int:
    note(f"add {first} {second}")
    return first + second


@task(takes_context=True, queue_name="mail")
async def describe(context: TaskContext, text: str) -> dict[str, object]:
    return {"text": text, "id": context.task_result.id, "attempt": context.attempt}


@task
def fail(text: str) -> None:
    raise LookupError(text)


@task
def slow(name: str) -> str:
    """Take as long as the file SHOP_JOURNAL.hold exists."""
    note(f"slow {name}")
    while Path(os.environ["SHOP_JOURNAL"]).with_suffix(".hold").exists():
        time.sleep(0.02)
    return name
