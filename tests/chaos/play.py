"""One run: server, proxies, workers, producers, observer and fault injector, until the last task has an outcome."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import anyio
from perdure import Producer
from perdure.queues import list_workers
from perdure.queues.limits.store import LimitStore
from perdure.worker.log import configure_logging

from tests.support.key_leaks import leaked_keys

from .clerk import Clerk
from .final_state import note_finals, settle_down
from .fleet import Fleet
from .injector import FaultInjector
from .journal import JournalWriter
from .limits import left_over
from .observer import Observer
from .options import NAMESPACE, Options
from .planned import end_pauses, end_schedules, note_schedules
from .proxy import Proxy
from .sampler import Sampler
from .schedule import schedule
from .server import DurableServer
from .sessions import note_sessions, sessions_settled
from .spending import note_purses
from .ticker import Ticker
from .versions import (
    NoHistory,
    former_commit,
    knows_budgets,
    knows_children,
    knows_limits,
    knows_schedules,
    knows_streams,
    unpack,
)

__all__ = ["play"]

_LAPSED_WITHIN: Final = 45.0
"""Seconds in which the token of a process that was killed lapses."""

_TICK: Final = 0.1
"""Seconds between two calls that move the clock on by which tokens lapse."""

_STARTED_WITHIN: Final = 240.0
"""Seconds in which all workers start, on a busy machine."""


async def play(options: Options) -> None:
    """Play the run. Its journal is in the folder of the options; all processes have ended on return.

    SIGTERM cancels it, as SIGINT does by `asyncio.run`: else the workers and the server would outlive it.
    """
    if (running := asyncio.current_task()) is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    configure_logging("ERROR")
    (options.journal / "ledger").mkdir(parents=True)
    journal = JournalWriter(options.journal)
    async with AsyncExitStack() as stack:
        former = _former(options, stack, journal)
        server = DurableServer()
        stack.callback(server.close)
        server.start()
        proxies = [await stack.enter_async_context(Proxy(server.socket).open()) for _ in range(options.workers + 1)]
        producer = await stack.enter_async_context(Producer(server.url, namespace=NAMESPACE))
        fleet = Fleet(options, proxies, journal, former, server.url)
        stack.push_async_callback(fleet.close)
        journal.write(
            "begins",
            seed=options.seed,
            seconds=options.seconds,
            lease=options.lease,
            workers=options.workers,
            producers=options.producers,
            processes=options.processes,
            clock=time.time() * 1000,
        )
        fleet.start()
        await _wait_for_workers(producer, fleet)
        observing = asyncio.create_task(Observer(producer, options.journal, journal).run())
        stack.callback(observing.cancel)
        clerking = asyncio.create_task(Clerk(producer, journal).run())
        stack.callback(clerking.cancel)
        if options.sample:
            sampling = asyncio.create_task(Sampler(producer, fleet.spared, journal).run())
            stack.callback(sampling.cancel)
        ticker = Ticker(server.url)
        ticking = asyncio.create_task(ticker.run())
        stack.callback(ticking.cancel)
        injector = FaultInjector(options, server, ticker, fleet, proxies, journal)
        await injector.run(schedule(options.seed, options.seconds, options.pause, options.workers, options.faults))
        await injector.finish()
        await end_pauses(producer)
        await end_schedules(producer)
        for one in fleet.producers:
            one.finish()
        quiet = await settle_down(producer, options.patience) and await sessions_settled(producer, options.patience)
        journal.write("quiet" if quiet else "impatient")
        await _wait_for_tokens(producer, server.url, journal)
        fleet.pages.once = True
        fleet.pages.finish()
        await fleet.pages.ended(60.0)
        await asyncio.sleep(1.0)  # waiters get the last outcomes, and the observer sees them
        await _end(observing, clerking)
        await note_finals(producer, options.journal, journal)
        await note_sessions(producer, journal)
        await note_schedules(producer, journal)
        await note_purses(producer, journal)
        journal.write("ends")


async def _end(*looking: asyncio.Task[None]) -> None:
    for task in looking:
        task.cancel()
    for error in await asyncio.gather(*looking, return_exceptions=True):
        if error is not None and not isinstance(error, asyncio.CancelledError):
            raise error


async def _wait_for_tokens(producer: Producer, url: str, journal: JournalWriter) -> None:
    """Wait until no token is held: those that a killed process took before it admitted a task lapse.

    Nor is there a list of what waits, nor a key without TTL of a task that has ended.
    """
    begin = time.monotonic()
    store = LimitStore(producer.gateway, producer.namespace)
    while found := [*await left_over(producer), *await asyncio.to_thread(leaked_keys, url, NAMESPACE)]:
        if (seconds := time.monotonic() - begin) > _LAPSED_WITHIN:
            journal.write("left_over", seconds=seconds, found=found[:20])
            return
        for _ in range(10):  # each call moves their clock on by at most half of the shortest lease of the run
            await store.touch()
            await asyncio.sleep(_TICK)


async def _wait_for_workers(producer: Producer, fleet: Fleet) -> None:
    """Wait until every worker has registered; the faults begin then."""
    wanted = sum(host.processes if host.supervised else 1 for host in (*fleet.hosts, *fleet.spared))
    with anyio.fail_after(_STARTED_WITHIN):
        while len(await list_workers(producer.gateway, producer.namespace)) < wanted:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.1)


def _former(options: Options, stack: AsyncExitStack, journal: JournalWriter) -> Path | None:
    """Return the folder of the other version; if there is no such version, log that and return None."""
    if options.previous == "":
        return None
    try:
        commit = options.previous or former_commit()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perdure-former-")))
        former = unpack(commit, folder)
        if not all(
            knows(former) for knows in (knows_children, knows_streams, knows_limits, knows_schedules, knows_budgets)
        ):
            raise NoHistory(f"commit {commit[:12]} has no waits, children, streams, limits or schedules")
        journal.write("versions", former=commit)
        return former
    except NoHistory as problem:
        sys.stderr.write(f"no other version takes part: {problem}\n")
        journal.write("versions", former=None, problem=str(problem)[:200])
        return None
