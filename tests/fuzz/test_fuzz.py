"""Hostile messages: an entry that bypasses the producer has no effect on any other task.

`make fuzz` posts 10,000 entries. FUZZ_SEED (printed where a test fails) and FUZZ_COUNT change what is posted.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import time
import unicodedata
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
import psutil
import pytest
import redis.asyncio
from perdure import Producer, Settings
from perdure.deadletter.letters import DeadLetter, Filter, list_letters
from perdure.deadletter.policy import Reason
from perdure.queues import Gateway, Partition, UnreadableEnvelope, list_workers
from perdure.queues.envelope import Envelope
from perdure.queues.keys import GROUP

from tests.fuzz.gathering import gather
from tests.fuzz.hostile import DECOY, ID, Fields, classics
from tests.support.command_line import COMMAND, Answer, call
from tests.support.paths import PROGRAMS

pytestmark = [pytest.mark.integration, pytest.mark.processes]

SEED = int(os.environ.get("FUZZ_SEED", "20261121"))
ENTRIES = int(os.environ.get("FUZZ_COUNT", "400"))

HONEST_EACH = 20
"""One honest task after so many hostile entries."""

CONCURRENCY = 16

STALLED = 60.0
"""Seconds without any outcome after which the worker counts as stuck. They bound a failure and decide nothing else."""

MEBIBYTE = 1024 * 1024
ROOM = CONCURRENCY * 2 * 16 * MEBIBYTE
"""What the worker may need beyond what it needs at rest, however many messages there are: it holds as many as it has
slots, of 2 MB each at most, and as Python objects JSON such as `0,` takes 16 bytes for a byte.
"""

KEPT = 64 * MEBIBYTE
"""What it may keep afterwards, or half of what it needed at most, where that is more: the allocator gives back no page
of which a part is used. Where something leaked, twice as many messages would leave twice as much: they leave no more.
"""

SHOWN = 40
"""Dead letters of different kinds that are shown one by one."""

ENDED = ("succeeded", "dead", "cancelled")
TARGET = PROGRAMS / "target.py"


@dataclass
class Target:
    """A worker process, and what Redis tells of its outcomes."""

    process: psutil.Process
    log: Path
    gateway: Gateway
    partition: Partition
    outcomes: list[tuple[str, str]] = field(default_factory=list)
    """Record and outcome, in the order in which they were stored."""

    def memory(self) -> int:
        return int(self.process.memory_info().rss)

    def peak(self) -> int:
        reported = (Path("/proc") / str(self.process.pid) / "status").read_text()
        return int(reported.partition("VmHWM:")[2].split()[0]) * 1024

    def forget_peak(self) -> None:
        (Path("/proc") / str(self.process.pid) / "clear_refs").write_text("5")

    async def reach(self, wanted: Collection[str]) -> None:
        """Wait until each of these tasks has an outcome, and nothing is left to be done."""
        missing, since = set(wanted), time.monotonic()
        seen = 0
        while missing or not await self.is_idle():
            new = self.outcomes[seen:]
            if new:
                since = time.monotonic()
            seen += len(new)
            missing -= {task for task, _ in new}
            stuck = time.monotonic() > since + STALLED or not self.process.is_running()
            assert not stuck, f"no outcome of {sorted(missing)[:20]}; the log ends:\n{self.log.read_text()[-3000:]}"
            await anyio.sleep(0.02)

    async def is_idle(self) -> bool:
        """Whether there is no message, no pending entry and no scheduled task."""
        waiting = await self.gateway.pipeline([("XLEN", self.partition.ready), ("ZCARD", self.partition.due)])
        held = await self.gateway.command("XPENDING", self.partition.ready, GROUP, "-", "+", 1)
        return waiting == [0, 0] and held == []


@contextmanager
def program(settings: Settings, log: Path) -> Iterator[psutil.Process]:
    """`perdure worker run`, whose log goes into a file."""
    reported = {
        "PERDURE_REDIS_URL": settings.redis_url,
        "PERDURE_NAMESPACE": settings.namespace,
        "PERDURE_UNKNOWN_TASK": json.dumps({"max_attempts": 2, "base": 0.01, "jitter": 0.0}),
    }
    with log.open("wb") as file:
        command = [*COMMAND, "worker", "run", f"{TARGET}:app", "--no-supervisor", "--concurrency", str(CONCURRENCY)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=file, env=os.environ | reported)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(STALLED)


@asynccontextmanager
async def target(settings: Settings, producer: Producer, folder: Path) -> AsyncIterator[Target]:
    """The program once it runs, with a subscriber that records every outcome."""
    client = redis.asyncio.Redis.from_url(settings.redis_url)
    with program(settings, folder / "log") as process:
        found = Target(process, folder / "log", producer.gateway, producer.namespace.partition("target"))
        with anyio.fail_after(STALLED):
            while not await list_workers(producer.gateway, producer.namespace):  # noqa: ASYNC110 - there is no event for it
                await anyio.sleep(0.01)
        async with client, client.pubsub() as ear:
            await ear.psubscribe(f"{{{settings.namespace}:*")

            async def listen() -> None:
                async for message in ear.listen():
                    reported = message["data"].decode() if message["type"] == "pmessage" else ""
                    if reported in ENDED:
                        found.outcomes.append((message["channel"].decode().rpartition(":record:")[2], reported))

            listening = asyncio.create_task(listen())
            try:
                yield found
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)


@dataclass
class Posted:
    """Where each entry stands among the others, by the id that its outcome will have. shared: ids that came before."""

    positions: dict[str, int] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)

    def add(self, task: str, position: int) -> None:
        if task in self.positions:
            self.shared.add(task)
        self.positions[task] = position

    @property
    def honest(self) -> list[str]:
        return [task for task in self.positions if task.startswith("honest")]


async def post(target: Target, producer: Producer, entries: Sequence[Fields]) -> Posted:
    """Put entries on the stream as they are, with honest tasks in between."""
    posted = Posted()
    for start in range(0, len(entries), HONEST_EACH):
        commands: list[tuple[str | bytes, ...]] = []
        some: list[Fields] = []
        for number, fields in enumerate(entries[start : start + HONEST_EACH], start):
            some.append([(name, value.replace(ID.encode(), b"hostile-%d" % number)) for name, value in fields])
            flat = [part for pair in some[-1] for part in pair]
            commands.append(("XADD", target.partition.ready, "*", *flat))
        for number, entry in enumerate(await target.gateway.pipeline(commands)):
            posted.add(task_of(some[number], entry), start + number)
        handle = await producer.enqueue("honest", {"number": start}, task_id=f"honest-{start}", queue="target")
        posted.add(handle.id, start + len(some))
    return posted


def task_of(fields: Fields, entry: bytes) -> str:
    """The id of the task that an entry is, or under which it is buried."""
    try:
        return Envelope.decode(dict(fields).get(b"env", b"")).id
    except UnreadableEnvelope:
        return f"unreadable-{entry.decode()}"


def overtaken(outcomes: Sequence[tuple[str, str]], positions: dict[str, int]) -> int:
    """The largest number of entries that were posted after an honest task and had their outcome before it."""
    worst = 0
    done: list[int] = []
    for task, _ in outcomes:
        at = positions.get(task)
        if at is not None and task.startswith("honest"):
            worst = max(worst, sum(other > at for other in done))
        elif at is not None:
            done.append(at)
    return worst


async def letters_of(producer: Producer, partition: Partition) -> list[DeadLetter]:
    return [one async for one in list_letters(producer.gateway, [partition], Filter())]


TURNS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
"""Bidirectional classes of the characters that turn the direction of writing."""


def is_clean(text: str) -> bool:
    """Whether a terminal shows the text and does nothing else."""
    return not any(
        unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(char) in TURNS
        for char in set(text) - {"\n", "\t"}
    )


@pytest.fixture
async def producer(settings: Settings) -> AsyncIterator[Producer]:
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        yield producer


async def test_poison_from_outside_harms_only_itself(settings: Settings, producer: Producer, tmp_path: Path) -> None:
    print(f"FUZZ_SEED={SEED} FUZZ_COUNT={ENTRIES}")  # noqa: T201 - shown where the test fails
    first = classics()
    entries = first + await anyio.to_thread.run_sync(functools.partial(gather, ENTRIES - len(first), SEED))

    async def command(*args: str, codes: Collection[int] = (0,)) -> Answer:
        """One command of the command line; its answer is clean and tells of no fault of ours."""
        place = ("--redis-url", settings.redis_url, "--namespace", settings.namespace)
        answer = await anyio.to_thread.run_sync(functools.partial(call, *args, *place))
        assert answer.code in codes, (args, answer.err[-2000:])
        assert is_clean(answer.out), args
        assert is_clean(answer.err), args
        return answer

    async with target(settings, producer, tmp_path) as worker:
        warm = await producer.enqueue_many("honest", [{"number": number} for number in range(300)], queue="target")
        await producer.enqueue("honest", {"number": 0}, task_id=DECOY, queue="target")
        await worker.reach([*(handle.id for handle in warm), DECOY])
        before, started = worker.memory(), len(worker.outcomes)
        worker.forget_peak()

        posted = await post(worker, producer, entries)
        await worker.reach(posted.positions)
        outcomes = worker.outcomes[started:]
        reported = Counter(task for task, _ in outcomes)
        assert {task for task, times in reported.items() if times != 1} <= posted.shared
        assert {outcome for task, outcome in outcomes if task in posted.honest} == {"succeeded"}
        assert overtaken(outcomes, posted.positions) <= 4 * CONCURRENCY
        letters = await letters_of(producer, worker.partition)
        assert len(letters) == sum(outcome == "dead" for _, outcome in outcomes)
        assert all(isinstance(one.reason, Reason) and one.error for one in letters)
        counts = Counter([*(str(one.reason) for one in letters), *(what for _, what in outcomes if what != "dead")])
        print(dict(counts), f"overtaken by {overtaken(outcomes, posted.positions)}")  # noqa: T201

        # what is dead can be seen and exported
        listed = (await command("dlq", "list", "--json", "--limit", "1000000")).json
        assert len(listed) == len(letters)
        await command("dlq", "list", "--limit", "1000000")
        kinds = {(one.reason, one.message[:50], one.task[:5], str(one.raw)[:20]): one.id for one in reversed(letters)}
        for number, task in enumerate(list(kinds.values())[:SHOWN]):
            await command("dlq", "show", task)
            if number % 4 == 0:
                await command("dlq", "show", task, "--json")
                await command("task", "show", task)
        await command("task", "list", "--limit", "1000")
        await command("dlq", "export", "-o", str(tmp_path / "letters"))
        assert len((tmp_path / "letters").read_text().splitlines()) == len(letters)

        # and replayed and purged
        again = len(worker.outcomes)
        replayed = await command("dlq", "replay", "--all", "--json", codes=(0, 1))
        gone = {one["id"] for one in replayed.lines if one["outcome"] == "gone"}
        assert gone <= posted.shared  # of one id, the latest letter can be replayed
        named = {one["id"] for one in replayed.lines if one["outcome"] == "replayed"}
        await worker.reach([task for task in named if not task.startswith("unreadable-")])
        assert len(worker.outcomes) - again >= len(named) - len(posted.shared)
        await command("dlq", "purge", "--all", "--yes")
        assert await letters_of(producer, worker.partition) == []

        await producer.enqueue("honest", {"number": 0}, task_id="last", queue="target")
        await worker.reach(["last"])
        used = [round(one / MEBIBYTE) for one in (before, worker.peak(), worker.memory())]
        print(f"MiB before, at most, afterwards: {used}")  # noqa: T201
        assert worker.peak() - before < ROOM
        assert worker.memory() - before < max(KEPT, (worker.peak() - before) / 2)
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert "the worker failed" not in log
    assert is_clean(log)
