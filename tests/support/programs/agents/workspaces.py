"""A worker whose task writes files in its workspace, step by step, and waits in the second one."""

from __future__ import annotations

import os
import sys

import anyio
from perdure import App, Context, Retry, Worker

JOURNAL = os.open(os.environ["JOURNAL"], os.O_APPEND | os.O_WRONLY)

app = App("files")


def note(what: str, key: str) -> None:
    os.write(JOURNAL, f"{os.getpid()} {what} {key}\n".encode())


async def wait_for(path: str) -> None:
    note("waits", "file")
    while not await anyio.Path(path).exists():  # noqa: ASYNC110 - a file has no event
        await anyio.sleep(0.005)


@app.task(retry=Retry(max_attempts=1, max_crashes=1000))
async def edit(ctx: Context, path: str) -> dict[str, str]:
    folder = anyio.Path(ctx.workspace.path)
    note("folder", str(folder))

    async def first() -> None:
        await (folder / "a.txt").write_text(f"by {os.getpid()}")

    async def second() -> None:
        await (folder / "half.txt").write_text(f"by {os.getpid()}")
        await wait_for(path)
        await (folder / "b.txt").write_text(f"by {os.getpid()}")
        await (folder / "half.txt").unlink()

    await ctx.step("first", first)
    await ctx.step("second", second)
    return {found.name: await found.read_text() async for found in folder.iterdir()}


async def main() -> None:
    async with Worker(app, concurrency=int(sys.argv[1])) as worker:
        sys.stdout.write(f"{worker.id}\n")
        sys.stdout.flush()
        await worker.run()


if __name__ == "__main__":
    anyio.run(main)
