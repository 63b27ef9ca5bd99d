"""Records of a large checkpoint that are read before the handler asks for them."""

from __future__ import annotations

import asyncio
import gc
from typing import Any, cast

import pytest
from perdure.queues.delivery.step_pages import PAGE, StepPages
from perdure.queues.keys import Namespace
from perdure.queues.transport.gateway import Gateway
from perdure.queues.transport.pipelining import Command
from perdure.queues.transport.scripts import Script

pytestmark = pytest.mark.anyio

FIRST = 1 + PAGE // 2
"""Steps of the first page; later ones have more."""


class Server(Gateway):
    """A gateway over a dict of step records. ahead: the futures of pages that are read ahead, which the test completes.

    asked: the steps of each page in the order of the requests.
    """

    def __init__(self, steps: int, size: int = 1) -> None:
        self.records = {f"d:page-{number}": b"r%d" % number + bytes(size) for number in range(steps)}
        self.asked: list[list[str]] = []
        self.ahead: list[tuple[Command, asyncio.Future[Any]]] = []

    def submit_now(self, *command: Any) -> asyncio.Future[Any]:
        self.ahead.append((command, asyncio.get_running_loop().create_future()))
        return self.ahead[-1][1]

    async def pipeline(self, commands: Any, *, node_of: str | None = None) -> list[Any]:
        return [self.reply(command) for command in commands]

    async def command(self, *command: Any, repeatable: bool = True, node_of: str | None = None) -> Any:
        return self.reply(command)

    async def run(self, script: Script, keys: Any, args: Any, derived: Any = None) -> Any:
        fields = [part for name, value in self.records.items() for part in (name.encode(), value)]
        return [b"the server", b"0", fields]

    def reply(self, command: Command) -> Any:
        self.asked.append([str(name).removeprefix("d:") for name in command[2:]])
        return [self.records.get(str(name)) for name in command[2:]]

    def answer(self) -> None:
        """Complete the last page that is read ahead with what is stored now."""
        command, future = self.ahead[-1]
        future.set_result(self.reply(command))


def pages_of(server: Server) -> tuple[StepPages, dict[str, bytes]]:
    known: dict[str, dict[str, bytes]] = {"d": {}, "i": {}, "s": {}}
    partition = Namespace("test").partition("queue", 0)
    return StepPages(server, partition, "task", known, len(server.records)), known["d"]


async def test_the_next_page_is_requested_once_and_before_a_step_of_it_is_asked_for() -> None:
    server = Server(2000)
    pages, known = pages_of(server)
    assert await pages.read("page-0") == server.records["d:page-0"]
    assert len(server.ahead) == 1
    server.answer()
    for number in range(2000):
        step = f"page-{number}"
        if step not in known and server.ahead and not server.ahead[-1][1].done():
            server.answer()
        found = pages.take(step, None) or await pages.read(step)
        assert found == server.records[f"d:{step}"]
        pages.take(step, None)
    asked = [step for page in server.asked for step in page]
    assert len(asked) == len(set(asked))
    assert len(server.asked) == 1 + len(server.ahead)


async def test_a_missing_record_ends_reading_ahead() -> None:
    server = Server(FIRST + 10)
    pages, known = pages_of(server)
    await pages.read("page-0")
    server.answer()
    assert await pages.read(f"page-{FIRST}") is not None
    assert len(server.ahead) == 1
    assert len(known) == len(server.records)
    assert await pages.read(f"page-{FIRST + 10}") is None


async def test_a_page_that_begins_after_the_last_record_is_not_taken_for_other_names() -> None:
    server = Server(FIRST)
    pages, _ = pages_of(server)
    await pages.read("page-0")
    server.answer()
    assert await pages.read(f"page-{FIRST}") is None
    assert await pages.read("other") is None
    assert len(server.ahead) == 1


@pytest.mark.parametrize("lost", [ConnectionResetError("connection lost"), None], ids=["failed", "cancelled"])
async def test_a_page_whose_reply_is_lost_is_read_again(lost: Exception | None) -> None:
    server = Server(2 * FIRST)
    pages, _ = pages_of(server)
    await pages.read("page-0")
    reading = asyncio.create_task(pages.read(f"page-{FIRST}"))
    await asyncio.sleep(0)
    assert not reading.done()
    if lost is None:
        server.ahead[0][1].cancel()
    else:
        server.ahead[0][1].set_exception(lost)
    assert await reading == server.records[f"d:page-{FIRST}"]
    assert server.asked[1][0] == f"page-{FIRST}"


async def test_a_cancelled_reader_leaves_the_page_to_the_next_one() -> None:
    server = Server(2 * FIRST)
    pages, _ = pages_of(server)
    await pages.read("page-0")
    reading = asyncio.create_task(pages.read(f"page-{FIRST}"))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert await pages.read(f"page-{FIRST}") == server.records[f"d:page-{FIRST}"]


async def test_the_error_of_a_page_that_is_not_asked_for_is_not_logged() -> None:
    unhandled: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    server = Server(2 * FIRST)
    pages, _ = pages_of(server)
    await pages.read("page-0")
    server.ahead.pop()[1].set_exception(ConnectionResetError("connection lost"))
    del pages
    await asyncio.sleep(0)
    gc.collect()
    assert unhandled == []


async def test_records_that_change_before_a_rewind_are_read_again() -> None:
    server = Server(2 * FIRST)
    pages, _ = pages_of(server)
    await pages.read("page-0")
    server.answer()
    server.records[f"d:page-{FIRST}"] = b"new"
    pages.forget_ahead()
    assert await pages.read(f"page-{FIRST}") == b"new"


async def test_a_page_does_not_replace_known_records() -> None:
    server = Server(2 * FIRST)
    pages, known = pages_of(server)
    known[f"page-{FIRST + 1}"] = b"of this run"
    await pages.read("page-0")
    server.answer()
    await pages.read(f"page-{FIRST}")
    assert known[f"page-{FIRST + 1}"] == b"of this run"
    assert known[f"page-{FIRST + 2}"] == server.records[f"d:page-{FIRST + 2}"]


async def test_nothing_is_read_ahead_after_a_scan_has_started() -> None:
    server = Server(2 * FIRST)
    pages, known = pages_of(server)
    await pages.read_all()
    assert len(known) == len(server.records)
    await pages.read("page-0")
    assert server.ahead == []


async def test_two_pages_of_large_records_are_bounded() -> None:
    server = Server(2000, size=100_000)
    pages, _ = pages_of(server)
    await pages.read("page-0")
    assert len(cast("tuple[Any, ...]", server.ahead[0][0])) - 2 <= 12
