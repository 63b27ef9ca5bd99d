"""Pages of the run: a process that follows the streams of tasks, and may be killed.

`python -m tests.chaos.page SEED`. It reads the journal for tasks that were stored. Each page shows what no mark has
voided, and logs that with the end of its stream. Some pages are loaded again from their cursor after a few items. A
process that takes the place of a killed one opens pages for all tasks whose end no page has logged. At SIGTERM it opens
no more, waits for the ends, and logs the pages that have none.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
from perdure import Producer, StreamItem, TaskHandle
from perdure.queues import QueueError, TaskNotFound, Unavailable

from .instrumentation import FOLDER, JOURNAL
from .journal import JOURNAL_NAME
from .kinds import KINDS

__all__: list[str] = []

_STREAMS: Final = ("output", "tokens", "facts")

_PATIENCE: Final = 45.0
"""Seconds that a page waits for its end after its task has ended: more than a reader polls without a notification."""


@dataclass
class _Page:
    """One page. patience: items after which it is loaded again; 0 for never. begin: number of its first item."""

    stream: str
    last: int | None
    patience: int
    shown: list[StreamItem] = field(default_factory=list)
    begin: int | None = None
    cursor: str | None = None
    end: StreamItem | None = None

    def take(self, item: StreamItem) -> None:
        self.shown = [shown for shown in self.shown if not item.voids(shown)]
        if item.kind == "item":
            self.shown.append(item)
        if item.kind == "end":
            self.end = item
        elif item.kind == "cut_off" and item.reason == "lost":
            self.begin = 1
        elif self.begin is None:
            self.begin = int(item.cursor)
        self.cursor = item.cursor


class Reader:
    """Opens pages for tasks, and follows them."""

    def __init__(self, producer: Producer, seed: int) -> None:
        self._producer = producer
        self._dice = random.Random(seed)
        self._file = FOLDER / JOURNAL_NAME
        self._read = 0
        self._open: dict[str, list[asyncio.Task[None]]] = {}
        self._finishing = asyncio.Event()

    def finish(self) -> None:
        """Open no more pages."""
        self._finishing.set()

    async def run(self) -> None:
        """Follow the tasks of the journal until `finish` is called, and then those that are open."""
        while not self._finishing.is_set():
            stored, shown = self._follow()
            for task, (queue, partition) in stored.items():
                if task not in shown and task not in self._open:
                    self._open[task] = [
                        asyncio.create_task(self._show(task, queue, partition, page)) for page in self._pages()
                    ]
            await asyncio.sleep(0.1)
        pages = [page for pages in self._open.values() for page in pages]
        if pages:
            await asyncio.wait(pages, timeout=_PATIENCE)
        for task, opened in self._open.items():
            for page in opened:
                if not page.done():
                    JOURNAL.write("unshown", task=task)
                elif (error := page.exception()) is not None:
                    JOURNAL.write("unshown", task=task, error=repr(error)[:300])

    def _follow(self) -> tuple[dict[str, tuple[str, int]], set[str]]:
        with self._file.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        end = new.rfind(b"\n") + 1
        self._read += end
        stored: dict[str, tuple[str, int]] = {}
        shown: set[str] = set()
        for text in new[:end].splitlines():
            if b'"acknowledged"' in text or b'"shown"' in text:
                line = orjson.loads(text)
                if line["what"] == "acknowledged" and KINDS[line["kind"]].streams:
                    stored[line["task"]] = line["queue"], line["partition"]
                elif line["what"] == "shown":
                    shown.add(line["task"])
        return stored, shown

    def _pages(self) -> list[_Page]:
        choice = self._dice.choice
        return [
            _Page(choice(_STREAMS), None, 0),
            _Page(choice(_STREAMS), None, choice((1, 2, 5))),
            _Page(choice(_STREAMS), choice((1, 3)), choice((0, 4))),
        ]

    async def _show(self, task: str, queue: str, index: int, page: _Page) -> None:
        if page.last is not None:
            await asyncio.sleep(self._dice.uniform(0.2, 3.0))
        partition = self._producer.namespace.partition(queue, index)
        since = time.monotonic_ns()
        while page.end is None:
            handle = TaskHandle[Any](task, partition, self._producer.gateway, self._producer.notifications)
            try:
                await self._read_on(page, handle)
            except TaskNotFound:
                JOURNAL.write("not_shown", task=task, stream=page.stream, since=since)
                return
            except Unavailable:
                await asyncio.sleep(0.2)
        items = [[int(item.cursor), item.value] for item in page.shown]
        end = {"state": page.end.state, "number": int(page.end.cursor), "result": page.end.result}
        about = {"begin": page.begin, "last": page.last, "patience": page.patience}
        JOURNAL.write("shown", task=task, stream=page.stream, since=since, items=items, end=end, **about)

    async def _read_on(self, page: _Page, handle: TaskHandle[Any]) -> None:
        where: dict[str, Any] = {"last": page.last} if page.cursor is None else {"after": page.cursor}
        left = page.patience
        async with aclosing(handle.stream(page.stream, **where)) as items:
            async for item in items:
                page.take(item)
                left -= 1
                if left == 0:
                    return


async def main() -> None:
    async with Producer() as producer:
        JOURNAL.write("process", role="page", version="this", package="", parent=0)
        try:
            reader = Reader(producer, int(sys.argv[1]))
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, reader.finish)
            await reader.run()
        except QueueError as error:
            JOURNAL.write("page_failed", task=None, error=f"{type(error).__name__}: {error}"[:300])
            raise


if __name__ == "__main__":
    asyncio.run(main())
