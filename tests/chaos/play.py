"""One run: server, lines, workers, producers, observer and monkey, from the first task to the last outcome."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import anyio
from perdure import Producer
from perdure.queues import list_workers
from perdure.worker.log import configure_logging

from .ending import note_finals, settle_down
from .fleet import Fleet
from .journal import Pen
from .line import Line
from .monkey import Monkey
from .observer import Observer
from .options import NAMESPACE, Options
from .schedule import schedule
from .server import DurableServer
from .versions import NoHistory, former_commit, unpack

__all__ = ["play"]

_STARTED_WITHIN: Final = 60.0


async def play(options: Options) -> None:
    """Play the run; its journal is in the folder of the options afterwards, and all processes have ended."""
    configure_logging("ERROR")
    (options.journal / "ledger").mkdir(parents=True)
    pen = Pen(options.journal)
    async with AsyncExitStack() as stack:
        former = _former(options, stack, pen)
        server = DurableServer()
        stack.callback(server.close)
        server.start()
        lines = [await stack.enter_async_context(Line(server.port).open()) for _ in range(options.workers + 1)]
        producer = await stack.enter_async_context(Producer(server.url, namespace=NAMESPACE))
        fleet = Fleet(options, lines, pen, former)
        stack.push_async_callback(fleet.close)
        pen.note(
            "begins",
            seed=options.seed,
            seconds=options.seconds,
            lease=options.lease,
            workers=options.workers,
            producers=options.producers,
            processes=options.processes,
        )
        fleet.start()
        await _all_there(producer, fleet)
        observing = asyncio.create_task(Observer(producer, options.journal, pen).run())
        stack.callback(observing.cancel)
        monkey = Monkey(options, server, fleet, lines, pen)
        await monkey.run(schedule(options.seed, options.seconds, options.pause, options.workers, options.faults))
        await monkey.rest()
        for one in fleet.producers:
            one.rest()
        quiet = await settle_down(producer, options.patience)
        pen.note("quiet" if quiet else "impatient")
        await asyncio.sleep(1.0)  # waiters hear of the last outcomes, the observer sees them
        observing.cancel()
        await asyncio.gather(observing, return_exceptions=True)
        if observing.done() and not observing.cancelled() and (error := observing.exception()):
            raise error
        await note_finals(producer, options.journal, pen)
        pen.note("ends")


async def _all_there(producer: Producer, fleet: Fleet) -> None:
    """Wait until every worker has announced itself: the monkey's time begins then.

    A supervisor has an isolated worker besides.
    """
    wanted = sum(host.processes + 1 if host.supervised else 1 for host in fleet.hosts)
    with anyio.fail_after(_STARTED_WITHIN):
        while len(await list_workers(producer.gateway, producer.namespace)) < wanted:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.1)


def _former(options: Options, stack: AsyncExitStack, pen: Pen) -> Path | None:
    """Return the folder of the other version; if there is no such version, log that and return None."""
    if options.previous == "":
        return None
    try:
        commit = options.previous or former_commit()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perdure-former-")))
        pen.note("versions", former=commit)
        return unpack(commit, folder)
    except NoHistory as problem:
        sys.stderr.write(f"no other version takes part: {problem}\n")
        pen.note("versions", former=None, problem=str(problem)[:200])
        return None
