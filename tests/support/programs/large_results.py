"""A worker whose tasks have large results or arguments.

HELD names what it never stores: `reference`, that to stored chunks, or `link`, that to a stored object.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).parents[3]))

from perdure import App, Context, Retry, Worker
from perdure.queues.delivery.checkpoint import Entry, Kind
from perdure.worker.durable.checkpoint_writer import CheckpointWriter

import tests.support.servers.shared_store  # noqa: F401 - registers the protocol of PERDURE_ARTIFACTS

JOURNAL = os.open(os.environ["JOURNAL"], os.O_APPEND | os.O_WRONLY)
HELD = os.environ.get("HELD")

app = App("large")


def note(what: str, key: str) -> None:
    os.write(JOURNAL, f"{os.getpid()} {what} {key}\n".encode())


put = CheckpointWriter.put


async def held_put(writer: CheckpointWriter, *entries: Entry, **how: Any) -> None:
    """Put entries; stop before the record that refers to chunks."""
    if HELD == "reference" and any(entry.kind is Kind.DONE and b"\n#" in entry.value for entry in entries):
        note("chunks", "stored")
        await anyio.sleep_forever()
    if HELD == "link" and any(entry.kind is Kind.CHUNK for entry in entries):
        note("object", "stored")
        await anyio.sleep_forever()
    await put(writer, *entries, **how)


CheckpointWriter.put = held_put  # type: ignore[assignment,method-assign]


def make(size: int) -> str:
    note("make", "text")
    return "x" * size


async def wait_for(path: str) -> None:
    note("waits", "file")
    while not await anyio.Path(path).exists():  # noqa: ASYNC110 - a file has no event
        await anyio.sleep(0.005)


@app.task(retry=Retry(max_attempts=1, max_crashes=1000))
async def report(ctx: Context, size: int, path: str) -> str:
    text = await ctx.step("make", make, size)
    await ctx.step("wait", wait_for, path)
    return f"<{text}>"


@app.task(retry=Retry(max_attempts=1, max_crashes=1000))
async def count(ctx: Context, text: str, path: str) -> int:
    note("takes", str(len(text)))
    first = await ctx.step("count", text.count, "x")
    await ctx.step("wait", wait_for, path)
    return first + text.count("x")


async def main() -> None:
    async with Worker(app, concurrency=int(sys.argv[1])) as worker:
        sys.stdout.write(f"{worker.id}\n")
        sys.stdout.flush()
        await worker.run()


if __name__ == "__main__":
    anyio.run(main)
