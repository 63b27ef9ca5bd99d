"""Fault injector: carries out the schedule, and logs the start and the end of each fault."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

import anyio
import anyio.to_thread
import redis

from .fleet import Fleet, ManagedProcess
from .journal import JournalWriter
from .options import Options
from .proxy import Proxy
from .schedule import Plan
from .server import DurableServer
from .ticker import Ticker

__all__ = ["FaultInjector"]

_START_UP: Final = 2.0
"""Seconds in which a worker has started and tried to reach the server."""

_TAIL: Final = 1.2
"""Seconds of writes that a power cut loses: a second until the next fsync, and the time that it takes; also the lag of
the replica that is promoted.
"""

_RESULT_TTL: Final = 43_200.0
"""Seconds; the clock faults of a run move the server's clock by less."""

_REPLAYED: Final = ("attempts_exhausted", "timeout", "crash_loop", "in_doubt")


_PAUSED: Final = (
    ("keyed",),
    ("default",),
    ("--task", "chain"),
    ("default", "--task", "leaf"),
    ("--where", "tenant=nights"),
    ("--where", "steps=3"),
)
"""Pauses: arguments of the command."""


class FaultInjector:
    """Injects the faults of a schedule, several at a time if they overlap."""

    def __init__(
        self,
        options: Options,
        server: DurableServer,
        ticker: Ticker,
        fleet: Fleet,
        proxies: Sequence[Proxy],
        journal: JournalWriter,
    ) -> None:
        self._options = options
        self._server = server
        self._ticker = ticker
        self._fleet = fleet
        self._proxies = proxies
        self._journal = journal
        self._numbers = itertools.count(1)
        self._server_lock = asyncio.Lock()
        self._command_line = asyncio.Lock()
        self._frozen: set[int] = set()
        self._clock_offset = 0
        self._stored: dict[str, float] = {}

    async def run(self, plans: Sequence[Plan]) -> None:
        """Inject them; return when all are over."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        async with anyio.create_task_group() as playing:
            for plan in plans:
                await asyncio.sleep(start + plan.at - loop.time())
                playing.start_soon(self._play, plan)

    async def _play(self, plan: Plan) -> None:
        act: Callable[[Plan], Awaitable[None]] = getattr(self, f"_{plan.fault}")
        try:
            await act(plan)
        except (ProcessLookupError, redis.RedisError) as error:  # the process has exited, or the server is away already
            self._journal.write("missed", kind=plan.fault, error=str(error)[:200])

    @asynccontextmanager
    async def _fault(self, kind: str, pids: Sequence[int] | None, **more: object) -> AsyncIterator[int]:
        """Log a fault for the duration of the block, whose value is its number. pids: processes hit; None for all."""
        number = next(self._numbers)
        self._journal.write("fault", number=number, kind=kind, pids=pids, **more)
        try:
            yield number
        finally:
            self._journal.write("fault_over", number=number)

    @asynccontextmanager
    async def _loss(self, kind: str) -> AsyncIterator[None]:
        """Log a fault by which Redis loses data, and the time up to which it has kept what it had stored."""
        async with self._fault(kind, None, seconds=_TAIL) as number, self._ticker.stopped():
            yield
            self._journal.write("kept", number=number, until=await self._ticker.last())

    def _host(self, plan: Plan) -> ManagedProcess:
        return self._fleet.hosts[plan.host]

    # workers

    async def _kill(self, plan: Plan) -> None:
        """Kill one worker; of a supervisor, one of its children."""
        host = self._host(plan)
        await self._kill_these(_one_of(host, plan.draw), "kill", of=host.pid)

    async def _kill_host(self, plan: Plan) -> None:
        """Kill all processes of a host at once, the supervisor included."""
        await self._kill_these(self._host(plan).pids(), "kill_host")

    async def _kill_supervisor(self, plan: Plan) -> None:
        """Kill a supervisor alone: its children release their tasks and exit."""
        supervisors = [host.pid for host in self._fleet.hosts if host.supervised and host.pid is not None]
        await self._kill_these(supervisors[int(plan.draw * len(supervisors)) :][:1], "kill_supervisor")

    async def _kill_all(self, plan: Plan) -> None:
        await self._kill_these([pid for host in self._fleet.hosts for pid in host.pids()], "kill_all")

    async def _kill_these(self, pids: Sequence[int], kind: str, **more: object) -> None:
        async with self._fault(kind, pids, **more):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def _freeze(self, plan: Plan) -> None:
        """Stop a whole host, or one worker, for longer than its lease."""
        await self._stand_still(plan, "freeze", self._options.lease * (1.2 + 1.3 * plan.length))

    async def _blink(self, plan: Plan) -> None:
        await self._stand_still(plan, "blink", self._options.lease * 0.5 * plan.length)

    async def _stand_still(self, plan: Plan, kind: str, seconds: float) -> None:
        host = self._host(plan)
        chosen = host.pids() if plan.draw < 0.5 else _one_of(host, plan.draw)
        pids = [pid for pid in chosen if pid not in self._frozen]
        self._frozen.update(pids)
        async with self._fault(kind, pids, seconds=seconds):
            try:
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(seconds)
            finally:
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
                self._frozen.difference_update(pids)

    async def _deploy(self, plan: Plan) -> None:
        """Send SIGTERM; another worker is started, of either version."""
        host = self._host(plan)
        pids = host.pids()
        host.version = self._fleet.versions[int(plan.draw * len(self._fleet.versions))]
        host.settings = {}
        async with self._fault("deploy", pids, to=host.version):
            host.send(signal.SIGTERM)

    async def _settings(self, plan: Plan) -> None:
        """Store settings for all workers, and restart a host with others: with a shorter lease or a longer one."""
        stored = {"lease": self._options.lease * (1.0 if plan.length < 0.5 else 1.5), "result_ttl": _RESULT_TTL}
        async with self._server_lock:
            for name, seconds in stored.items() - self._stored.items():
                if not await self._command("settings", "config", "set", name, f"{seconds:g}"):
                    return
                self._stored[name] = seconds
            await asyncio.sleep(2 * _TAIL)  # a later loss of the tail does not undo it
            self._journal.write("stored", **stored)
        host = self._host(plan)
        host.version = "this"
        host.settings = {
            "PERDURE_LEASE": f"{self._options.lease * (0.3 if plan.draw < 0.5 else 4):g}",
            "PERDURE_RESULT_TTL": f"{_RESULT_TTL / 10:g}",
        }
        async with self._fault("deploy", host.pids(), to=host.version, settings=host.settings):
            host.send(signal.SIGTERM)

    async def _reload(self, plan: Plan) -> None:
        """Send SIGHUP: a supervisor replaces its children one by one."""
        host = self._host(plan)
        if not host.supervised:
            host = self._fleet.hosts[0]
        if host.supervised:
            async with self._fault("reload", host.pids()):
                host.send(signal.SIGHUP)

    async def _kill_producer(self, plan: Plan) -> None:
        producers = [*self._fleet.producers, self._fleet.pages]
        await self._kill_these(producers[int(plan.draw * len(producers))].pids(), "kill_producer")

    # the server

    async def _redis_kill(self, plan: Plan) -> None:
        async with self._server_lock, self._fault("redis_kill", None):
            self._server.kill()
            await asyncio.sleep(plan.length * 1.5 * self._options.lease)
            await anyio.to_thread.run_sync(self._server.start)

    async def _redis_stop(self, plan: Plan) -> None:
        async with self._server_lock, self._fault("redis_stop", None):
            await anyio.to_thread.run_sync(self._server.terminate)
            await asyncio.sleep(plan.length * 1.5 * self._options.lease)
            await anyio.to_thread.run_sync(self._server.start)

    async def _redis_freeze(self, plan: Plan) -> None:
        async with self._server_lock, self._fault("redis_freeze", None):
            self._server.freeze()
            await asyncio.sleep(plan.length * 2 * self._options.lease)
            self._server.thaw()

    async def _lose_tail(self, plan: Plan) -> None:
        """Cut what the server appended last, as a power cut does under `appendfsync everysec`."""
        async with self._server_lock, self._loss("lose_tail"):
            try:
                lost = await anyio.to_thread.run_sync(self._server.lose_tail, _TAIL)
                self._journal.write("tail_lost", bytes=lost)
            except LookupError as error:  # the server was started less than this time ago
                self._journal.write("missed", kind=plan.fault, error=str(error))
            await anyio.to_thread.run_sync(self._server.start)

    async def _failover(self, plan: Plan) -> None:
        """Kill the primary, and promote a replica that lags behind."""
        async with self._server_lock:
            await anyio.to_thread.run_sync(self._server.add_replica, _TAIL)
            async with self._loss("failover"):
                await anyio.to_thread.run_sync(self._server.kill_primary)
                await asyncio.sleep(plan.length * 1.5 * self._options.lease)
                await anyio.to_thread.run_sync(self._server.promote_replica)

    async def _newcomer(self, plan: Plan) -> None:
        """Stop Redis for longer than a lease, and start a worker just before it is back."""
        lease = self._options.lease
        async with self._server_lock:
            async with self._fault("newcomer", None):
                await anyio.to_thread.run_sync(self._server.terminate)
                await asyncio.sleep(lease * (1.1 + 0.5 * plan.length))
                newcomer = self._fleet.start_newcomer()
                await asyncio.sleep(_START_UP)
                await anyio.to_thread.run_sync(self._server.start)
            await asyncio.sleep(3 * lease)
            async with self._fault("deploy", newcomer.pids(), to=newcomer.version):
                newcomer.finish()
                await newcomer.ended(_START_UP + 2 * self._options.grace)
            await newcomer.close()

    async def _clock(self, plan: Plan) -> None:
        """Set the server's clock forward by up to ten minutes, or back by up to ten seconds."""
        clock = self._server.clock
        if clock is None:
            self._journal.write("missed", kind=plan.fault, error="there is no C compiler to set the server's clock")
            return
        step = round(600 * plan.length if plan.draw < 0.5 else -10 * plan.length)
        async with self._server_lock, self._fault("clock", [], seconds=step):
            self._clock_offset += step
            clock.set(self._clock_offset)

    async def _flush(self, plan: Plan) -> None:
        await self._tell_server("flush", "SCRIPT", "FLUSH")

    async def _cut_all(self, plan: Plan) -> None:
        await self._tell_server("cut_all", "CLIENT", "KILL", "TYPE", "normal")

    async def _cut_news(self, plan: Plan) -> None:
        await self._tell_server("cut_news", "CLIENT", "KILL", "TYPE", "pubsub")

    async def _cut_one(self, plan: Plan) -> None:
        async with self._server_lock:
            with redis.Redis.from_url(self._server.url, socket_timeout=5) as client:
                ids = [int(one["id"]) for one in client.client_list()]
                async with self._fault("cut_one", None):
                    client.client_kill_filter(_id=str(ids[int(plan.draw * len(ids))]))

    async def _tell_server(self, kind: str, *command: str) -> None:
        async with self._server_lock:
            with redis.Redis.from_url(self._server.url, socket_timeout=5) as client:
                async with self._fault(kind, None):
                    client.execute_command(*command)

    # the proxies

    async def _hold(self, plan: Plan) -> None:
        proxy = self._proxies[plan.host]
        async with self._fault("hold", self._host(plan).pids(), host=plan.host):
            proxy.hold()
            await asyncio.sleep(plan.length**2 * 12)  # sometimes longer than the timeout of a command
            proxy.heal()

    async def _late(self, plan: Plan) -> None:
        """Withhold what a worker sends until it has sent it again on another connection, then deliver it."""
        proxy = self._proxies[plan.host]
        async with self._fault("late", self._host(plan).pids(), host=plan.host):
            proxy.withhold()
            await asyncio.sleep(plan.length * 2 * self._options.lease)
            await proxy.cut_withheld()
            await asyncio.sleep(plan.draw * 2 * self._options.lease)
            self._journal.write("delivered_late", bytes=await proxy.deliver_late())

    async def _slow(self, plan: Plan) -> None:
        """Delay replies by at most a twelfth of a lease."""
        await self._delay(plan, "slow", plan.draw * self._options.lease / 24)

    async def _crawl(self, plan: Plan) -> None:
        """Delay replies by more than the third of a lease that a heartbeat waits."""
        await self._delay(plan, "crawl", self._options.lease * (0.17 + 0.1 * plan.draw))

    async def _delay(self, plan: Plan, kind: str, each_way: float) -> None:
        proxy = self._proxies[plan.host]
        async with self._fault(kind, self._host(plan).pids(), host=plan.host, each_way=each_way):
            proxy.slow(each_way)
            await asyncio.sleep(1 + plan.length * 4)
            proxy.heal()

    async def _break(self, plan: Plan) -> None:
        proxy = self._proxies[int(plan.draw * len(self._proxies))]  # the proxy of the producers as well
        async with self._fault("break", None):
            await proxy.cut()

    # the operator

    async def _replay(self, plan: Plan) -> None:
        reason = _REPLAYED[int(plan.draw * len(_REPLAYED))]
        await self._command("replay", "dlq", "replay", "--all", "--reason", reason, fresh=False)

    async def _replay_fresh(self, plan: Plan) -> None:
        await self._command("replay", "dlq", "replay", "--all", "--fresh", fresh=True)

    async def _resume(self, plan: Plan) -> None:
        """Resume the supervisors that paused after too many crashes."""
        await self._command("resume", "worker", "resume", "--all")

    async def _partitions(self, plan: Plan) -> None:
        queue = "keyed" if plan.length < 0.6 else "default"
        await self._command("partitions", "queue", "partitions", queue, str(1 + int(plan.draw * 4)))

    async def _pause(self, plan: Plan) -> None:
        """Pause a queue, a task or the tasks with an argument for a while. If Redis loses the end, the pause stays."""
        what = _PAUSED[int(plan.draw * len(_PAUSED))]
        if await self._command("pause", "queue", "pause", *what, "--why", "chaos"):
            await asyncio.sleep(plan.length * 3 * self._options.lease)
            for _ in range(20):
                if await self._command("pause", "queue", "resume", *what):
                    return
                await asyncio.sleep(0.5)  # Redis is away

    async def _plan(self, plan: Plan) -> None:
        """Run a schedule by hand, or pause one for a while."""
        if plan.draw < 0.5:
            await self._command("plan", "schedule", "run", "beats" if plan.length < 0.5 else "nights")
        elif await self._command("plan", "schedule", "pause", "pulse", "--why", "chaos"):
            await asyncio.sleep(plan.length * 5)
            while not await self._command("plan", "schedule", "resume", "pulse"):  # noqa: ASYNC110 - Redis is away
                await asyncio.sleep(0.5)

    async def _command(self, kind: str, *command: str, **more: object) -> bool:
        """Run a command of the command line; return whether it succeeded. The fault lasts as long as the command."""
        async with self._command_line, self._fault(kind, [], command=" ".join(command), **more):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "perdure.worker.cli", *command),
                env=self._fleet.environment(self._server.url, "this"),
                cwd=self._options.journal,
                stdout=PIPE,
                stderr=PIPE,
            )
            out, error = await process.communicate()
            self._journal.write("commanded", code=process.returncode, out=len(out.split()), error=error.decode()[-200:])
            return process.returncode == 0

    async def finish(self) -> None:
        """Undo what has no end of its own: heal the proxies and resume paused supervisors."""
        for proxy in self._proxies:
            proxy.heal()
        await self._command("resume", "worker", "resume", "--all")
        self._journal.write("faults_over")


def _one_of(host: ManagedProcess, draw: float) -> list[int]:
    """Return the process id of a plain worker, or of one child of a supervisor."""
    pids = host.pids()
    workers = pids[1:] if host.supervised else pids
    return workers[int(draw * len(workers)) :][:1]
