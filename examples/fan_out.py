"""Fan-out: one child for each item, on as many workers as there are, and one result.

    perdure worker run examples/fan_out.py:app --processes 4 &
    python examples/fan_out.py docs README.md

The task `count_all` spawns a child for each file and is parked until all have ended, so that it needs no slot. If a
worker is killed meanwhile, no file is counted twice. If the program is killed and started again with the same files, it
finds the same task by its id.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from perdure import App, ChildFailed, Context, Retry

app = App("words")


def count(path: str) -> dict[str, int]:
    words = Path(path).read_text("utf-8").lower().split()
    return dict(Counter(word for word in words if word.isalpha()))


@app.task(retry=Retry(max_attempts=3), timeout=60)
async def count_words(ctx: Context, path: str) -> dict[str, int]:
    return await ctx.step("count", count, path)


@app.task
async def count_all(ctx: Context, paths: list[str]) -> tuple[dict[str, int], list[str]]:
    """Return the words of all files, and what failed."""
    total: Counter[str] = Counter()
    failed: list[str] = []
    for words in await ctx.gather(count_words, paths, limit=100, errors="keep"):
        if isinstance(words, ChildFailed):  # a dead letter: the other files count nevertheless
            failed.append(str(words))
        else:
            total.update(words)
    return dict(total), failed


def task_id(paths: Iterable[Path]) -> str:
    """Return an id made of all paths and contents, so that a changed file makes a new task."""
    found = hashlib.sha256()
    for path in paths:
        found.update(str(path).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return f"words-{found.hexdigest()[:16]}"


async def fan_out(paths: list[Path]) -> tuple[dict[str, int], list[str]]:
    async with app:
        handle = await count_all.options(task_id=task_id(paths)).enqueue([str(path) for path in paths])
        return await handle.result(timeout=300)


def files_of(arguments: list[str]) -> list[Path]:
    """Return the files and the Markdown files of the folders, each once, by the path that links lead to."""
    found = [path for name in arguments for path in (Path(name), *Path(name).rglob("*.md"))]
    return sorted({path.resolve() for path in found if path.is_file()})


def main(arguments: list[str]) -> None:
    paths = files_of(arguments)
    total, failed = asyncio.run(fan_out(paths))
    print(f"{len(paths)} files:", ", ".join(f"{word} {times}" for word, times in Counter(total).most_common(5)))
    for problem in failed:
        print(problem, file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
