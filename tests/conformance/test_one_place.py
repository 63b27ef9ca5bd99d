"""A task is at every instant in exactly one place, whatever several workers and people do in whatever order."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from perdure.deadletter.letters import DeadLetter, Filter, list_letters
from perdure.deadletter.replay import Replay, purge, replay, trim_letters
from perdure.queues import Gateway, LeaseLost, Namespace, Partition, Producer, State
from perdure.queues.delivery.checkpoint import load_history
from perdure.queues.delivery.consumer import Consumer
from perdure.queues.delivery.due_set import promote_due
from perdure.queues.delivery.leases import Delivery
from perdure.queues.keys import RELEASED

from tests.conftest import ON_SERVERS
from tests.support.consumers import claim_all, ids, make_due, pending, read, worker
from tests.support.delivery_calls import FENCED, SETTLING, WRITING
from tests.support.task_places import DEAD, DUE, PENDING, READY, all_places, dump

ACTS = 200
SEEDS = (1, 2, 106)


class Walk:
    """A random sequence of acts, and what is known to follow from them."""

    def __init__(
        self, gateway: Gateway, partition: Partition, producer: Producer, crew: dict[str, Consumer], seed: int
    ) -> None:
        self.gateway = gateway
        self.partition = partition
        self.namespace = Namespace(partition.namespace)
        self.producer = producer
        self.crew = crew
        self.dice = random.Random(seed)
        self.trail: list[str] = []
        self.tasks: list[str] = []
        self.purged: set[str] = set()
        self.deliveries: list[tuple[Delivery, str]] = []  # all that ever were, stale ones too
        self.current: dict[str, Delivery] = {}  # the one delivery of a task that owns it now
        self.ended: list[Delivery] = []  # those that settled by themselves
        self.crashes: dict[str, int] = {}
        self.letters: list[DeadLetter] = []  # all that ever were, stale ones too

    async def step(self) -> None:
        moves: list[tuple[int, Callable[[], Awaitable[str]]]] = [
            (12, self.enqueue),
            (20, self.read),
            (12, self.claim),
            (24, self.act),
            (6, self.cancel),
            (8, self.promote),
            (7, self.replay),
            (3, self.purge),
            (3, self.leave),
            (3, self.look),
            (3, self.recover),
        ]
        move = self.dice.choices([move for _, move in moves], [weight for weight, _ in moves])[0]
        self.trail.append(move.__name__)
        self.trail[-1] = await move()
        await self.check()

    async def check(self) -> None:
        found = await all_places(self.gateway, self.partition, self.tasks)
        wrong = {one: at for one, at in found.items() if len(at) != (one not in self.purged)}
        assert not wrong, f"{wrong} after {self.trail[-12:]}"
        on_stream = sum(at in ([READY], [PENDING]) for at in found.values())
        assert await self.gateway.command("XLEN", self.partition.ready) == on_stream, self.trail[-12:]

    async def place(self, task_id: str) -> str | None:
        at = (await all_places(self.gateway, self.partition, [task_id]))[task_id]
        return at[0] if at else None

    async def unchanged(self, act: Callable[[], Awaitable[object]], *allowed: type[Exception]) -> None:
        before = await dump(self.gateway, self.namespace)
        with suppress(*allowed):
            await act()
        assert await dump(self.gateway, self.namespace) == before, f"changed by {self.trail[-12:]}"

    async def enqueue(self) -> str:
        delay = self.dice.choice([0, 0, 60])
        if self.tasks and self.dice.random() < 0.4:
            task_id = self.dice.choice(self.tasks)
            if task_id not in self.purged:
                await self.unchanged(lambda: self.producer.enqueue("t", task_id=task_id, delay=delay, queue="default"))
                return f"enqueue {task_id} again"
        else:
            task_id = f"x{len(self.tasks)}"
            self.tasks.append(task_id)
        await self.producer.enqueue("t", task_id=task_id, delay=delay, queue="default")
        self.purged.discard(task_id)
        self.crashes[task_id] = 0
        return f"enqueue {task_id} delay={delay}"

    async def read(self) -> str:
        reader = self.dice.choice(sorted(self.crew))
        for delivery in await read(self.crew[reader], self.dice.randint(1, 3)):
            self._begin(delivery)
        return f"read by {reader}"

    def _begin(self, delivery: Delivery) -> str:
        (task_id,) = ids([delivery])
        assert delivery.fence not in [one.fence for one, _ in self.deliveries]
        self.deliveries.append((delivery, task_id))
        self.current[task_id] = delivery
        return task_id

    async def claim(self) -> str:
        claimer = self.dice.choice(sorted(self.crew))
        owners = {entry: owner for entry, owner, _, _ in await pending(self.gateway, self.partition)}
        _, claimed = await self.crew[claimer].claim(self.partition, "0-0", self.dice.randint(1, 4))
        for delivery in claimed:
            task_id = self._begin(delivery)
            self.crashes[task_id] += owners[delivery.entry] != RELEASED
            history = await load_history(self.gateway, delivery, task_id)
            assert history.counters.crashes == self.crashes[task_id], self.trail[-12:]
        return f"claim by {claimer}: {ids(claimed)}"

    async def recover(self) -> str:
        """A worker takes what is pending on it with a new fence, as after a lost reply."""
        name = self.dice.choice(sorted(self.crew))
        recovered = await self.crew[name].recover_own(self.partition)
        for delivery in recovered:
            self._begin(delivery)
        return f"recover by {name}: {ids(recovered)}"

    async def act(self) -> str:
        if not self.deliveries:
            return "nothing to act on"
        delivery, task_id = self.dice.choice(self.deliveries)
        if task_id in self.current and self.dice.random() < 0.5:
            delivery = self.current[task_id]
        name = self.dice.choice([*SETTLING, *WRITING])
        if name == "bury_unreadable":
            name = "bury"
        self.trail[-1] = f"{name} {task_id} by {delivery.fence}"
        if self.current.get(task_id) is delivery:
            await FENCED[name](self.gateway, delivery, task_id)
            if name in SETTLING:
                del self.current[task_id]
                self.ended.append(delivery)
            if name in ("reschedule", "park"):
                self.crashes[task_id] = 0
            if name == "bury":
                self.letters += [one async for one in list_letters(self.gateway, [self.partition], Filter())][:1]
        elif any(one is delivery for one in self.ended) or name in ("give_back", "release"):
            # It has done so already, or an act that looks the same: the answer may be yes.
            await self.unchanged(lambda: FENCED[name](self.gateway, delivery, task_id), LeaseLost)
        else:
            with pytest.raises(LeaseLost):
                await FENCED[name](self.gateway, delivery, task_id)
            await self.unchanged(lambda: FENCED[name](self.gateway, delivery, task_id), LeaseLost)
        return self.trail[-1]

    async def cancel(self) -> str:
        if not self.tasks:
            return "nothing to cancel"
        task_id = self.dice.choice(self.tasks)
        handle = await self.producer.find(task_id)
        before = await self.place(task_id)
        if task_id in self.purged:
            assert handle is None
            return f"cancel {task_id}: purged"
        assert handle is not None
        state = await handle.cancel()
        if before in (READY, DUE) or (before == PENDING and task_id not in self.current):
            assert state is State.CANCELLED, self.trail[-12:]
        elif before == PENDING:
            assert state is State.RUNNING, self.trail[-12:]
        else:
            assert state == before, self.trail[-12:]
        return f"cancel {task_id}: {state}"

    async def promote(self) -> str:
        found = await all_places(self.gateway, self.partition, self.tasks)
        waiting = [one for one, at in found.items() if at == [DUE] and self.dice.random() < 0.6]
        await make_due(self.gateway, self.partition, *waiting)
        moved, _ = await promote_due(self.gateway, self.partition)
        return f"promote {waiting}: {moved}"

    async def replay(self) -> str:
        if not self.letters:
            return "nothing to replay"
        letter = self.dice.choice(self.letters)
        dead = await self.place(letter.id) == DEAD
        newest = [one for one in self.letters if one.id == letter.id][-1]
        done = await replay(self.gateway, letter, Replay(fresh=self.dice.random() < 0.5))
        assert done == (dead and letter.entry == newest.entry), self.trail[-12:]
        if done:
            self.crashes[letter.id] = 0
        return f"replay {letter.id}: {done}"

    async def purge(self) -> str:
        if not self.letters:
            return "nothing to purge"
        letter = self.dice.choice(self.letters)
        done = await purge(self.gateway, letter)
        if done:
            self.purged.add(letter.id)
        return f"purge {letter.id}: {done}"

    async def leave(self) -> str:
        leaver = self.dice.choice(sorted(self.crew))
        await self.crew[leaver].leave()
        for task_id, delivery in list(self.current.items()):
            if delivery.worker == leaver:
                del self.current[task_id]
        return f"leave by {leaver}"

    async def look(self) -> str:
        """What must not change anything, at whatever moment."""
        worker = self.crew[self.dice.choice(sorted(self.crew))]
        await self.unchanged(lambda: worker.remove_idle_consumers(self.partition, -1.0, present=[]))
        await self.unchanged(lambda: trim_letters(self.gateway, self.partition, 3600.0))
        return "look"

    async def finish(self) -> None:
        """Whatever state it was left in, the work can be brought to its end."""
        await make_due(self.gateway, self.partition, *self.tasks)
        await promote_due(self.gateway, self.partition)
        last = self.crew["w0"]
        for delivery in [*await claim_all(last), *await read(last, 1000)]:
            await SETTLING["succeed"](self.gateway, delivery, self._begin(delivery))
        found = await all_places(self.gateway, self.partition, self.tasks)
        expected = {"succeeded", "cancelled", DEAD}
        assert {one: at for one, at in found.items() if at and not set(at) <= expected} == {}
        assert await self.gateway.command("XLEN", self.partition.ready) == 0
        assert await pending(self.gateway, self.partition) == []
        for task_id in self.tasks:
            handle = await self.producer.find(task_id)
            assert (handle is None) == (task_id in self.purged)
            if handle is not None:
                assert (await handle.status()).terminal


@pytest.mark.parametrize("gateway", ON_SERVERS, indirect=True)
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_task_is_always_in_one_place(
    gateway: Gateway, partition: Partition, producer: Producer, seed: int
) -> None:
    crew = {name: await worker(gateway, partition, name=name, lease=0.0) for name in ("w0", "w1", "w2")}
    walk = Walk(gateway, partition, producer, crew, seed)
    for _ in range(ACTS):
        await walk.step()
    await walk.finish()
