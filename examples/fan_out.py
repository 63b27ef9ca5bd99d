"""Fan-out: one task for each item, on as many workers as there are, and one result.

    perdure worker run examples/fan_out.py:app --processes 4 &
    python examples/fan_out.py docs README.md

The program enqueues the tasks and waits for their results. If it is killed and started again with the same arguments,
it finds the same tasks by their ids, and no file is counted twice. Tasks that start other tasks and wait for them
without a slot (children) are not part of this version: a task that awaits the results of others holds its slot.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from perdure import App, Context, Retry, TaskFailed

app = App("words")


def count(path: str) -> dict[str, int]:
    words = Path(path).read_text("utf-8").lower().split()
    return dict(Counter(word for word in words if word.isalpha()))


@app.task(retry=Retry(max_attempts=3), timeout=60)
async def count_words(ctx: Context, path: str) -> dict[str, int]:
    return await ctx.step("count", count, path)


def task_id(path: Path) -> str:
    """Return an id made of all arguments, here the path, and of the content, so that a changed file is a new task."""
    return "words-" + hashlib.sha256(str(path).encode() + b"\0" + path.read_bytes()).hexdigest()[:16]


async def fan_out(paths: Iterable[Path]) -> tuple[Counter[str], list[str]]:
    """Return the words of all files, and what failed."""
    total: Counter[str] = Counter()
    failed: list[str] = []
    async with app:
        handles = [await count_words.options(task_id=task_id(path)).enqueue(str(path)) for path in paths]
        for next_result in asyncio.as_completed([handle.result(timeout=300) for handle in handles]):
            try:
                total.update(await next_result)
            except TaskFailed as error:  # a dead letter: the other files count nevertheless
                failed.append(str(error))
    return total, failed


def files_of(arguments: list[str]) -> list[Path]:
    """Return the files and the Markdown files of the folders, each once, by the path that links lead to."""
    found = [path for name in arguments for path in (Path(name), *Path(name).rglob("*.md"))]
    return sorted({path.resolve() for path in found if path.is_file()})


def main(arguments: list[str]) -> None:
    paths = files_of(arguments)
    total, failed = asyncio.run(fan_out(paths))
    print(f"{len(paths)} files:", ", ".join(f"{word} {times}" for word, times in total.most_common(5)))
    for problem in failed:
        print(problem, file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
