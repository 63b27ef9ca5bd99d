"""Joins under deaths and late bytes: any process may die at each of its commands, and any call may arrive again.

The model keeps how each child has ended, and checks the rest against Redis: each child ends in the join once, none is
enqueued twice, the window is never exceeded, and the parent is woken when it need not wait any longer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Any

import fakeredis
from hypothesis import example, given, settings
from hypothesis import strategies as st
from perdure.deadletter.letters import find_letter
from perdure.deadletter.replay import Replay, replay
from perdure.queues import LeaseLost, Namespace, State, read_record
from perdure.queues.delivery.consumer import Consumer
from perdure.queues.delivery.leases import Delivery
from perdure.queues.delivery.settlement import Counters, park, succeed
from perdure.queues.derived_tasks import Successor, enqueue_successor
from perdure.queues.enqueueing import BatchEnqueuer
from perdure.queues.envelope import Envelope, EnvelopeTemplate
from perdure.queues.handle import cancel_task
from perdure.queues.joins import (
    ChildEnd,
    JoinPlace,
    OnFailure,
    PlannedChild,
    add_children,
    close_join,
    deliver_notices,
    ended_children,
    life_of,
    look_at_join,
    read_join,
    read_outcomes,
)
from perdure.queues.partitions.router import PartitionRouter

from tests.model.mortal import Died, Mortal
from tests.support.consumers import read, read_one, worker
from tests.support.delivery_calls import SETTLING

CHILDREN = 5
SCRIPTS = {
    *("add_children", "enqueue_child", "confirm_launch", "notify_join", "notice_sent", "watch", "close_join"),
    *("enqueue_successor", "finish"),
}
"""Scripts whose bytes may arrive again."""


class Play:
    """A parent, its children in a window, and the workers of both."""

    def __init__(self, gateway: Mortal, mode: OnFailure, limit: int) -> None:
        self.gateway, self.mode, self.limit = gateway, mode, limit
        namespace = Namespace("model")
        self.home, self.small = namespace.partition("home"), namespace.partition("small")
        self.place = JoinPlace(self.home, "parent", "g")
        self.names = [f"c{number}" for number in range(CHILDREN)]
        self.added = 0
        self.parent: Delivery
        self.children: Consumer
        self.ended: dict[str, State] = {}  # children and successors, by their last end
        self.successes: Counter[str] = Counter()
        self.closed = False

    async def open(self) -> None:
        router = PartitionRouter(self.gateway, Namespace("model"), "home")
        await BatchEnqueuer(self.gateway, router, 0.0).one(EnvelopeTemplate("p").message(b"{}", task_id="parent"))
        self.parent = await read_one(await worker(self.gateway, self.home))
        self.children = await worker(self.gateway, self.small, name="b")

    async def spawn(self, which: int) -> None:
        """Add the first children, those that were added before among them, as each run of the parent does."""
        if not self.closed:
            self.added = max(self.added, which + 1)
            template = EnvelopeTemplate("c")
            planned = [PlannedChild("small", template.message(b"{}", task_id=one)) for one in self.names[: self.added]]
            options: dict[str, Any] = {"on_failure": self.mode, "limit": self.limit, "life": life_of(0, 0)}
            await add_children(self.gateway, self.parent, self.place, planned, **options)

    async def run(self, which: int) -> None:
        """Run the next child to its end; its worker dies before it delivers the notice."""
        for delivery in await read(self.children):
            name, how = str(delivery.task_id), ("succeed", "succeed", "succeed", "bury", "hand", "cancelled")[which % 6]
            left, self.gateway.left = self.gateway.left, None  # the lease brings it back
            if how == "hand" and "." not in name:
                next_ = Successor(
                    Envelope(id=f"{name}.h1", task="c"), "small", b"{}", ("#received", b"{}"), f"{name} x"
                )
                await enqueue_successor(self.gateway, Namespace("model"), next_)
                counters = Counters(1)
                await succeed(self.gateway, delivery, name, b"null", counters, ran=0.1, ttl=60, handed_to=f"{name}.h1")
            else:
                how = "succeed" if how == "hand" else how
                await SETTLING[how](self.gateway, delivery, name)
                self.ended[name.partition(".")[0]] = {
                    "succeed": State.SUCCEEDED,
                    "bury": State.DEAD,
                    "cancelled": State.CANCELLED,
                }[how]
                self.successes[name] += how == "succeed"
            self.gateway.left = left

    async def deliver(self, which: int) -> None:
        """Deliver a notice, whether it is in the outbox or was delivered before."""
        await deliver_notices(self.gateway, [(self.small, self.names[which % CHILDREN] + (".h1" if which % 2 else ""))])

    async def sweep(self, _: int) -> None:
        for member in await self.gateway.command("ZRANGE", self.small.outbox, 0, -1):
            await deliver_notices(self.gateway, [(self.small, member.decode())])

    async def look(self, _: int) -> None:
        await look_at_join(self.gateway, self.place, retention=60)

    async def replay(self, which: int) -> None:
        name = self.names[which % CHILDREN]
        if (letter := await find_letter(self.gateway, [self.small], name)) is not None:
            await replay(self.gateway, letter, Replay())
            self.ended.pop(name, None)

    async def cancel(self, which: int) -> None:
        name = self.names[which % CHILDREN]
        if await read_record(self.gateway, self.small, name) is not None:
            state = await cancel_task(self.gateway, self.small, name, retention=60)
            if state is State.CANCELLED:
                self.ended.setdefault(name, state)

    async def late(self, which: int) -> None:
        """Let the bytes of any former call arrive once more."""
        calls = [call for call in self.gateway.calls or [] if call[0].name in SCRIPTS]
        if calls:
            script, keys, args = calls[-1 - which * 7 % len(calls)]
            await self.gateway.run(script, keys, args)

    async def check(self) -> None:
        """Check what holds at every moment."""
        state = await read_join(self.gateway, self.place)
        if state is not None:
            names = await ended_children(self.gateway, self.place, 0)
            assert len(names) == len(set(names)) == state.ended
            assert state.ended + state.open + state.todo == state.total <= self.added
            assert not self.limit or state.open <= self.limit
        messages = [flat[1] for _, flat in await self.gateway.command("XRANGE", self.small.ready, "-", "+")]
        assert len(messages) == len(set(messages))
        assert all(count <= 1 for count in self.successes.values())


ACTS = st.sampled_from(["spawn", "run", "run", "run", "deliver", "sweep", "look", "replay", "cancel", "late", "late"])
STEPS = st.lists(st.tuples(ACTS, st.integers(0, 9), st.none() | st.integers(0, 9), st.booleans()), max_size=30)
FAST = [(act, 4, None, False) for act in ("spawn", "run", "deliver", "late", "sweep", "look")]


@settings(max_examples=60)
@given(STEPS, st.sampled_from(OnFailure), st.integers(0, 3))
@example(FAST, OnFailure.KEEP, 1)
def test_each_child_ends_once_wherever_processes_die(
    steps: list[tuple[str, int, int | None, bool]], mode: OnFailure, limit: int
) -> None:
    asyncio.run(play(steps, mode, limit))


async def play(steps: list[tuple[str, int, int | None, bool]], mode: OnFailure, limit: int) -> None:
    gateway = Mortal.over(fakeredis.FakeAsyncRedis(version=(7,), protocol=2))
    assert isinstance(gateway, Mortal)
    game = Play(gateway, mode, limit)
    await game.open()
    gateway.calls = []
    for act, which, dies_at, executed in steps:
        gateway.left, gateway.executed = dies_at, executed
        with suppress(Died):
            await getattr(game, act)(which % CHILDREN if act == "spawn" else which)
        gateway.left = None
        await asyncio.sleep(0)  # what the process had sent together with its last command
        await game.check()
    await game.spawn(CHILDREN - 1)
    await park(gateway, game.parent, "parent", Counters(), delay=3600, waits="children", conditions=[("join", "g")])
    for _ in range(4 * CHILDREN):
        await game.run(0)
        await game.sweep(0)
        await game.look(0)
        if mode is OnFailure.WAIT:
            for number in range(CHILDREN):
                await game.replay(number)
        await game.check()
    await judge(game)
    await finish(game)
    await gateway.close()


async def judge(game: Play) -> None:
    """Check what all children have come to, and that the parent knows."""
    state = await read_join(game.gateway, game.place)
    assert state is not None
    assert state.over
    assert state.total == CHILDREN
    score = float(await game.gateway.command("ZSCORE", game.home.due, "parent"))
    assert score <= int((await game.gateway.command("TIME"))[0]) * 1000 + 1000, "the parent is due"
    found = {one.child: one.state async for one in read_outcomes(game.gateway, game.place, game.names)}
    assert len(found) == state.ended
    if state.failed is None:
        assert found.keys() == set(game.names)
        assert set(found.values()) == {ChildEnd.SUCCEEDED} or game.mode is OnFailure.KEEP
    else:
        assert game.mode is not OnFailure.KEEP
        assert found[state.failed] is not ChildEnd.SUCCEEDED
    assert not await game.gateway.command("EXISTS", game.small.outbox)


async def finish(game: Play) -> None:
    """Close the join, as often as it takes, and check that nothing is left, whatever arrives late."""
    game.gateway.left, game.gateway.executed = 2, True
    with suppress(Died):
        await close_join(game.gateway, game.place, retention=60)
    game.gateway.left = None
    await close_join(game.gateway, game.place, retention=60)
    game.closed = True
    for which in range(30):
        await game.late(which)
    await game.sweep(0)
    join, launched, todo = game.place.keys
    assert await game.gateway.command("EXISTS", join, launched, game.home.joins) == 0
    assert 0 < await game.gateway.command("PTTL", todo) <= 1_200_000
    for name in game.names:
        record = await read_record(game.gateway, game.small, name)
        assert record is None or record.state.terminal
    with_lease = [one async for one in _lost(game)]
    assert with_lease == []


async def _lost(game: Play) -> Any:
    try:
        await add_children(
            game.gateway,
            game.parent,
            game.place._replace(group="h"),
            [PlannedChild("small", EnvelopeTemplate("c").message(b"{}", task_id="x"))],
            on_failure=game.mode,
            life=life_of(0, 0),
        )
    except LeaseLost:
        return
    yield "a parent that is parked has added a child"
