"""Limited tasks under deaths and late bytes: any process may die at each of its commands, any call may arrive again.

Another program may delete from waiting lists. The model keeps which tasks run, and in which order those of an ordered
key came. At every moment each task is in one place, no limit is exceeded, and no later task of an ordered key has
overtaken an earlier one. At last all of them end, and nothing of the lists is left.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import fakeredis
from hypothesis import example, given, settings
from hypothesis import strategies as st
from perdure.queues import Namespace, Partition, State, read_record
from perdure.queues.admission import TOKEN_FIELD, Admission
from perdure.queues.delivery.consumer import Consumer
from perdure.queues.delivery.leases import Delivery
from perdure.queues.delivery.lost_tasks import put_back_lost
from perdure.queues.delivery.settlement import Counters, await_limit
from perdure.queues.enqueueing import BatchEnqueuer
from perdure.queues.envelope import LimitUse
from perdure.queues.handle import cancel_task
from perdure.queues.keys import gate_of
from perdure.queues.limits.definition import Limit
from perdure.queues.limits.store import LimitStore, ReleaseRequest, TakeRequest, token_member
from perdure.queues.partitions.router import PartitionRouter

from tests.model.mortal import Died, Mortal
from tests.support.consumers import make_due, promote, read, worker
from tests.support.delivery_calls import SETTLING
from tests.support.limited_tasks import LIFE, message, publish, use
from tests.support.task_places import all_places

POOL = Limit("pool", total=2, running=1, by="key")
LINE = Limit("line", running=1, by="key", ordered=True)
TASKS: dict[str, list[LimitUse]] = {
    **{f"p{number}": [use(POOL, "ab"[number % 2])] for number in range(5)},
    **{f"o{number}": [use(LINE, "ab"[number % 2])] for number in range(5)},
}
NAMES = list(TASKS)
ENDS = ("succeed", "reschedule", "park", "bury", "cancelled", "return")
SCRIPTS = {"enqueue_limited", "admit_limited", "await_limit", "finish", "reschedule", "park", "bury", "cancel"}
"""Scripts whose bytes may arrive again."""


class Play:
    """A partition with limited tasks, their movers, and a worker."""

    def __init__(self, gateway: Mortal) -> None:
        self.gateway = gateway
        self.namespace = Namespace("model")
        self.partition: Partition = self.namespace.partition("default")
        self.store = LimitStore(gateway, self.namespace, LIFE)
        self.admission = Admission(gateway, self.namespace, life=LIFE)
        self.reader: Consumer
        self.running: dict[str, tuple[Delivery, str]] = {}
        self.hints: list[str] = []
        self.order: dict[str, list[str]] = {}

    async def open(self) -> None:
        await publish(self.gateway, self.namespace, POOL, LINE)
        self.reader = await worker(self.gateway, self.partition)

    async def enqueue(self, which: int) -> None:
        name = NAMES[which % len(NAMES)]
        enqueuer = BatchEnqueuer(self.gateway, PartitionRouter(self.gateway, self.namespace, "default"), 0.0)
        await enqueuer.one(message(TASKS[name], name))

    async def admit(self, _: int) -> None:
        await self.admission.admit_due(self.partition)

    async def hint(self, _: int) -> None:
        hints, self.hints = self.hints, []
        await self.admission.admit_now(hints)

    async def begin(self, _: int) -> None:
        """Read a message, and start its task with the token, or return it to its list."""
        left, self.gateway.left = self.gateway.left, None  # the lease brings a message back that is read and lost
        found = await read(self.reader)
        for delivery in found:
            name = str(delivery.task_id)
            nonce = delivery.fields.get(TOKEN_FIELD, delivery.entry).decode()
            member = token_member(self.partition, name, nonce)
            gate = gate_of(TASKS[name])
            waiter = f"{self.partition.queue}/{self.partition.index}/{gate.key_id}/{gate.ring}"
            known = TOKEN_FIELD in delivery.fields
            if known or not gate.ordered:
                request = TakeRequest(member, TASKS[name], charge=not known, waiter=waiter)
                answer = (await self.store.take([request])).answers[0]
                if answer.granted:
                    self.running[name] = (delivery, member)
                    self.check_start(name)
                    continue
            await await_limit(self.gateway, delivery, name, Counters(), TASKS[name], retry=0.0)
        self.gateway.left = left

    def check_start(self, name: str) -> None:
        """Check that the task may run beside the others, and after those of its ordered key."""
        for limit in ("pool", "line"):
            keys = [TASKS[task][0].key for task in self.running if TASKS[task][0].name == limit]
            assert len(keys) == len(set(keys)), f"{limit}: {sorted(self.running)} run"
            assert limit == "line" or len(keys) <= 2
        line = self.order.get(TASKS[name][0].key, []) if name.startswith("o") else []
        assert name not in line or line.index(name) == 0, f"{name} has overtaken {line}"

    async def end(self, which: int) -> None:
        """End a run; its worker dies before or after the outcome, or before it has released the token."""
        if not self.running:
            return
        name = sorted(self.running)[which % len(self.running)]
        delivery, member = self.running[name]
        how = ENDS[which % len(ENDS)]
        try:
            if how == "return":
                await await_limit(self.gateway, delivery, name, Counters(), TASKS[name], retry=0.0)
            else:
                await SETTLING[how](self.gateway, delivery, name)
        finally:
            if await self.state(name) not in ("queued",):
                del self.running[name]
        self.hints += (await self.store.release([ReleaseRequest(member, TASKS[name])])).hints

    async def state(self, name: str) -> str:
        left, self.gateway.left = self.gateway.left, None
        state = await self.gateway.command("HGET", self.partition.record(name), "state")
        self.gateway.left = left
        return (state or b"").decode()

    async def promote(self, _: int) -> None:
        due = [member.decode() for member in await self.gateway.command("ZRANGE", self.partition.due, 0, -1)]
        if due:
            await make_due(self.gateway, self.partition, *due)
            await promote(self.gateway, self.partition, *due)

    async def cancel(self, which: int) -> None:
        name = NAMES[which % len(NAMES)]
        if await read_record(self.gateway, self.partition, name) is not None:
            await cancel_task(self.gateway, self.partition, name, retention=60)

    async def lose(self, which: int) -> None:
        """Delete a part of the waiting lists, as another program may, and put the tasks back."""
        gate, place = gate_of(TASKS[NAMES[which % len(NAMES)]]), self.partition
        key = (place.rings, place.turns(gate.ring), place.limited(gate.key_id))[which % 3]
        left, self.gateway.left = self.gateway.left, None
        await self.gateway.command("DEL", key)
        await put_back_lost(self.gateway, place, 0.0)
        self.gateway.left = left

    async def expire(self, _: int) -> None:
        """Let the tokens expire that no run holds, and the times pass until the next looks."""
        held = {member for _, member in self.running.values()}
        left, self.gateway.left = self.gateway.left, None
        for limit in (POOL, LINE):
            for key in ("-", *(use(limit, name).key for name in "ab")):
                where = self.namespace.limits.holders(limit.name, key)
                for member in await self.gateway.command("ZRANGE", where, 0, -1):
                    if member.decode().partition("/")[2 if key == "-" else 0].removeprefix("/") not in held and (
                        member.decode() not in held
                    ):
                        await self.gateway.command("ZREM", where, member)
        for ring in await self.gateway.command("ZRANGE", self.partition.rings, 0, -1):
            await self.gateway.command("ZADD", self.partition.rings, 0, ring)
            turns = self.partition.turns(ring.decode())
            for key_id in await self.gateway.command("ZRANGE", turns, 0, -1):
                await self.gateway.command("ZADD", turns, 0, key_id)
        self.gateway.left = left

    async def late(self, which: int) -> None:
        """Let the bytes of any former call arrive once more."""
        calls = [call for call in self.gateway.calls or [] if call[0].name in SCRIPTS]
        if calls:
            script, keys, args = calls[-1 - which * 7 % len(calls)]
            await self.gateway.run(script, keys, args)

    async def check(self) -> None:
        """Check what holds at every moment; note the order of ordered keys."""
        known = [name for name in NAMES if await self.state(name)]
        places = await all_places(self.gateway, self.partition, known)
        assert all(len(found) == 1 for found in places.values()), places
        for key in "ab":
            uses = [use(LINE, key)]
            line = await self.gateway.command("ZRANGE", self.partition.limited(gate_of(uses).key_id), 0, -1)
            now = [task.decode() for task in line]
            before = [task for task in self.order.get(uses[0].key, []) if task in now]
            assert [task for task in now if task in before] == before, "the order of a key has changed"
            self.order[uses[0].key] = now


ACTS = st.sampled_from(
    [
        *("enqueue", "enqueue", "enqueue", "admit", "admit", "hint", "begin", "begin", "end", "end", "end"),
        *("promote", "promote", "cancel", "lose", "expire", "late", "late"),
    ]
)
STEPS = st.lists(st.tuples(ACTS, st.integers(0, 29), st.none() | st.integers(0, 4), st.booleans()), max_size=40)
ALL = [("enqueue", number, None, False) for number in range(len(NAMES))]
TURN = [(act, 1, None, False) for act in ("admit", "begin", "end", "late", "promote", "expire", "lose")]


@settings(max_examples=40, deadline=None)
@given(STEPS)
@example([*ALL, *TURN, *TURN])
def test_each_limited_task_waits_in_one_place_and_starts_in_its_turn(
    steps: list[tuple[str, int, int | None, bool]],
) -> None:
    asyncio.run(play(steps))


async def play(steps: list[tuple[str, int, int | None, bool]]) -> None:
    gateway = Mortal.over(fakeredis.FakeAsyncRedis(version=(7,), protocol=2))
    assert isinstance(gateway, Mortal)
    game = Play(gateway)
    await game.open()
    gateway.calls = []
    for act, which, dies_at, executed in steps:
        gateway.left, gateway.executed = dies_at, executed
        with suppress(Died):
            await getattr(game, act)(which)
        gateway.left = None
        await asyncio.sleep(0)  # what the process had sent together with its last command
        await game.check()
    await finish(game)
    await gateway.close()


async def finish(game: Play) -> None:
    """Let all tasks end, and check that nothing of the lists is left."""
    known = [name for name in NAMES if await game.state(name)]
    for _ in range(3 * len(NAMES)):
        await game.expire(0)
        await game.promote(0)
        await game.admit(0)
        for _ in known:
            await game.begin(0)
        for _ in range(len(game.running)):
            await game.end(0)
        await game.check()
    states = {name: await read_record(game.gateway, game.partition, name) for name in known}
    left = {name: record.state for name, record in states.items() if record is not None and not record.state.terminal}
    assert left == {}
    await game.expire(0)
    await game.admit(0)
    found = await game.gateway.command("KEYS", "*")
    rest = [key for key in found if any(kind in key for kind in (b":limited:", b":turns:", b":rings", b":holders:"))]
    assert rest == []
    assert all(record is None or record.state in State for record in states.values())
