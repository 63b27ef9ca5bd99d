"""Scripts on limits beside a model of them: tokens, costs, waiters and a breaker, in any order, repeated and late.

The model executes the arguments of a call as the script does, by the virtual time that the script has stored. Then the
reply and all that is stored are compared.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import fakeredis
from hypothesis import example, given, settings
from hypothesis import strategies as st
from perdure import Breaker, Limit, Rate
from perdure.queues import Gateway, Namespace
from perdure.queues.envelope import LimitUse
from perdure.queues.limits.store import LimitStore, ReleaseRequest, TakeRequest
from perdure.queues.transport.pipelining import Argument
from perdure.queues.transport.scripts import Script

LIFE = 30_000
DAY = 86_400
KEYS = ("0" * 16, "1" * 16)
POOL = Limit(
    "pool",
    total=3,
    running=2,
    by="tenant",
    cost=Rate(10, per=10 * DAY),
    breaker=Breaker(errors=0.5, calls=3, window=1e9, open=DAY),
)
SERIAL = Limit("serial", total=1, rate=Rate(6, per=6 * DAY))
TOTAL, RUNNING = {"pool": 3, "serial": 1}, {"pool": 2}
"""One unit of rate and cost is back after a day, so what was charged decides, and not how long a run takes."""

USES = [
    [LimitUse("pool", KEYS[0], 3)],
    [LimitUse("pool", KEYS[1], 1)],
    [LimitUse("serial", "-", 1)],
    [LimitUse("pool", KEYS[0], 2), LimitUse("serial", "-", 1)],
    [LimitUse("pool", KEYS[1], 5), LimitUse("serial", "-", 1)],
]

Place = tuple[str, str]


@dataclass
class Model:
    """All that the scripts store, without what passes by itself."""

    now: int = 0
    tokens: dict[Place, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    waiters: dict[Place, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    paid: dict[Place, int] = field(default_factory=lambda: defaultdict(int))
    started: int = 0
    calls: int = 0
    errors: int = 0
    opened: bool = False
    tries: bool = False
    probe: tuple[str, str] | None = None

    def live(self, place: Place) -> dict[str, int]:
        return {member: expires for member, expires in self.tokens[place].items() if expires > self.now}

    def drop(self, name: str) -> None:
        """Remove expired tokens, as a script does where a set seems full."""
        for place in self.tokens:
            if place[0] == name:
                self.tokens[place] = self.live(place)

    def take(self, request: TakeRequest, waits: dict[Place, list[str]]) -> tuple[int, str] | str:
        missing = []
        for number, use in enumerate(request.uses):
            expires = self.live((use.name, use.key)).get(request.member)
            if expires is None:
                missing.append((number, use))
            elif expires < self.now + LIFE * 2 / 3:
                self.tokens[use.name, use.key][request.member] = self.now + LIFE
        for number, use in missing:
            reason, place = self.block(use, charge=request.charge)
            if reason:
                if place and request.waiter:
                    waits.setdefault(place, []).append(request.waiter)
                return number, reason
        for _, use in missing:
            self.tokens[use.name, use.key][request.member] = self.now + LIFE
            if request.charge and use.name == "pool":
                self.paid[use.name, use.key] += min(use.cost, 10)
            elif request.charge:
                self.started += 1
            if use.name == "pool" and self.opened:
                self.probe = (use.key, request.member)
        return "taken" if missing else "held"

    def block(self, use: LimitUse, *, charge: bool) -> tuple[str, Place | None]:
        if use.name == "pool" and self.opened:
            probing = self.probe is not None and self.probe[1] in self.live(("pool", self.probe[0]))
            if not self.tries or probing:
                return "open", (use.name, "-")
        if self.is_full([(use.name, use.key)], RUNNING.get(use.name, 99)):
            return "running", (use.name, use.key)
        if self.is_full([place for place in self.tokens if place[0] == use.name], TOTAL[use.name]):
            return "total", (use.name, "-")
        if charge and use.name == "serial" and self.started >= 6:
            return "rate", None
        if charge and use.name == "pool" and self.paid[use.name, use.key] + min(use.cost, 10) > 10:
            return "cost", None
        return "", None

    def is_full(self, places: Sequence[Place], most: int) -> bool:
        if sum(len(self.tokens[place]) for place in places) < most:
            return False
        self.drop(places[0][0])
        return sum(len(self.tokens[place]) for place in places) >= most

    def leave(self, waits: dict[Place, list[str]]) -> None:
        for place, listed in waits.items():
            for number, waiter in enumerate(listed, 1):
                self.waiters[place].setdefault(waiter, self.now + number / 1000)

    def release(self, request: ReleaseRequest, freed: dict[Place, int]) -> bool:
        removed = False
        for use in request.uses:
            place = (use.name, use.key)
            if self.tokens[place].pop(request.member, None) is None:
                continue
            removed = True
            for each in dict.fromkeys([(use.name, "-"), place]):
                freed[each] = freed.get(each, 0) + 1
            actual = request.actual.get(use.name)
            if use.name == "pool" and actual is not None:
                self.paid[place] = min(10, max(0, min(10, self.paid[place]) + actual - min(use.cost, 10)))
            if use.name == "pool":
                self.count(use.key, request, freed)
        return removed

    def count(self, key: str, request: ReleaseRequest, freed: dict[Place, int]) -> None:
        if self.opened:
            if self.probe != (key, request.member):
                return
            self.probe = None
            if request.outcome == "error":
                self.tries = False
            elif request.outcome == "ok":
                self.opened = self.tries = False
                freed["pool", "-"] += 15
        elif request.outcome:
            self.calls += 1
            self.errors += request.outcome == "error"
            if self.calls >= 3 and self.errors >= 0.5 * self.calls:
                self.opened, self.tries, self.probe, self.calls, self.errors = True, False, None, 0, 0

    def pop(self, freed: dict[Place, int]) -> list[str]:
        hints = []
        for place, most in freed.items():
            known = self.waiters[place]
            for waiter in sorted(known, key=lambda each: (known[each], each))[:most]:
                del known[waiter]
                hints.append(waiter)
        return hints

    def renew(self, member: str, uses: Sequence[LimitUse]) -> bool:
        gone = False
        for use in uses:
            place = (use.name, use.key)
            if member in self.live(place):
                self.tokens[place][member] = max(self.tokens[place][member], self.now + LIFE)
            else:
                gone = True
        return gone


class Recording(Gateway):
    """A gateway that keeps all calls of scripts."""

    calls: list[tuple[Script, Sequence[str], Sequence[Argument]]]

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument], derived: Any = None) -> Any:
        self.calls.append((script, keys, args))
        return await super().run(script, keys, args, derived)


class Play:
    """The limits on a server, and beside it the model."""

    def __init__(self, gateway: Recording) -> None:
        self.gateway, self.keys = gateway, Namespace("model").limits
        self.store, self.model = LimitStore(gateway, Namespace("model")), Model()
        gateway.calls = []
        self.former: list[Any] = []

    async def open(self) -> None:
        await self.store.publish([POOL, SERIAL], "app", starts=True)

    async def follow(self) -> None:
        """Let the model have the virtual time of the script that was executed."""
        self.model.now = int((await self.gateway.command("GET", self.keys.clock)).split()[1])

    async def take(self, which: int, kind: int) -> None:
        requests = [
            TakeRequest(
                f"q/0/t{(which + more) % 5}/n",
                USES[(kind + more) % len(USES)],
                charge=which % 4 != 0,
                waiter=f"q/0/{kind}{more}" if which % 3 else "",
            )
            for more in range(1 + kind % 3)
        ]
        await self.repeat(requests)

    async def release(self, which: int, kind: int) -> None:
        """Release what a task holds, mostly, or what it does not."""
        outcome: Any = ("", "ok", "error", "error")[which % 4]
        actual = {"pool": kind} if which % 2 else {}
        member, uses = f"q/0/t{which % 5}/n", USES[kind % len(USES)]
        held = sorted({each for tokens in self.model.tokens.values() for each in tokens})
        if held and kind:
            member = held[which % len(held)]
            uses = [
                LimitUse(*place, 3 if place == ("pool", KEYS[0]) else 1)
                for place, tokens in self.model.tokens.items()
                if member in tokens
            ]
        await self.repeat([ReleaseRequest(member, uses, outcome, actual)])

    async def renew(self, which: int, kind: int) -> None:
        await self.repeat([(f"q/0/t{(which + more) % 5}/n", USES[kind % len(USES)]) for more in range(2)])

    async def repeat(self, requests: Sequence[Any]) -> None:
        """Execute requests, as if for the first time, and compare the reply with that of the model."""
        self.former.append(requests)
        if isinstance(requests[0], TakeRequest):
            taken = await self.store.take(requests)
            await self.follow()
            waits: dict[Place, list[str]] = {}
            expected = [self.model.take(request, waits) for request in requests]
            self.model.leave(waits)
            found = [
                ("held" if answer.held else "taken") if answer.granted else (answer.use, answer.reason)
                for answer in taken.answers
            ]
            assert found == expected
            assert all(0 < answer.retry <= 60 for answer in taken.answers if not answer.granted)
        elif isinstance(requests[0], ReleaseRequest):
            released = await self.store.release(requests)
            await self.follow()
            freed: dict[Place, int] = {}
            gone = [number for number, request in enumerate(requests) if not self.model.release(request, freed)]
            assert (released.gone, released.hints) == (gone, self.model.pop(freed))
        else:
            lost = await self.store.renew(requests)
            await self.follow()
            assert lost == [number for number, token in enumerate(requests) if self.model.renew(*token)]

    async def late(self, which: int, _: int) -> None:
        """Let the bytes of any former call arrive once more."""
        if self.former:
            await self.repeat(self.former[-1 - which % len(self.former)])

    async def pass_time(self, which: int, _: int) -> None:
        await self.set_clock(0, which * 2_500)
        await self.follow()

    async def be_away(self, which: int, _: int) -> None:
        await self.set_clock((which - 5) * 7_000, 0)

    async def set_clock(self, seen: int, virtual: int) -> None:
        """Change the time of the last script and the virtual time by milliseconds."""
        before, time, *rest = (await self.gateway.command("GET", self.keys.clock)).split()
        changed = b"%d %d %b" % (int(before) + seen, int(time) + virtual, b" ".join(rest))
        await self.gateway.command("SET", self.keys.clock, changed)

    async def let_try(self, which: int, kind: int) -> None:
        if self.model.opened:
            await self.gateway.command("HSET", self.keys.limit("pool"), "opened", 1)
            self.model.tries = True

    async def check(self) -> None:
        """Compare what is stored with the model, and check that no limit is exceeded."""
        pool, serial = [self.model.live(("pool", key)) for key in KEYS], self.model.live(("serial", "-"))
        assert max(map(len, pool)) <= 2
        assert sum(map(len, pool)) <= 3
        assert len(serial) <= 1
        for key, tokens in zip(KEYS, pool, strict=True):
            assert await self.scores(self.keys.holders("pool", key)) == tokens
        assert await self.scores(self.keys.holders("serial")) == {f"-/{name}": at for name, at in serial.items()}
        both = {f"{key}/{name}": at for key, live in zip(KEYS, pool, strict=True) for name, at in live.items()}
        assert await self.scores(self.keys.holders("pool")) == both
        for name, key in (("pool", "-"), ("pool", KEYS[0]), ("pool", KEYS[1]), ("serial", "-")):
            flat = await self.gateway.command("ZRANGE", self.keys.waiters(name, key), 0, -1)
            known = self.model.waiters[name, key]
            assert [member.decode() for member in flat] == sorted(known, key=lambda each: (known[each], each))

    async def scores(self, place: str) -> dict[str, int]:
        flat = await self.gateway.command("ZRANGEBYSCORE", place, f"({self.model.now}", "+inf", "WITHSCORES")
        return {member.decode(): int(float(at)) for member, at in zip(flat[::2], flat[1::2], strict=True)}


ACTS = [
    "take",
    "take",
    "take",
    "take",
    "release",
    "release",
    "renew",
    "late",
    "late",
    "pass_time",
    "be_away",
    "let_try",
]
STEPS = st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 11), st.integers(0, 9)), max_size=40)


def tripped() -> Iterator[tuple[str, int, int]]:
    """Open the breaker, let one probe pass, and close it."""
    for _ in range(3):
        yield from (("take", 1, 0), ("release", 6, 0))
    yield from (("take", 1, 0), ("let_try", 0, 0), ("take", 4, 1), ("take", 2, 1), ("release", 5, 1))


@settings(max_examples=150)
@given(STEPS)
@example(list(tripped()))
@example([("take", 1, 3), ("be_away", 0, 0), ("take", 2, 3), ("pass_time", 11, 0), ("take", 2, 3), ("late", 0, 0)])
def test_limits_agree_with_the_model(steps: list[tuple[str, int, int]]) -> None:
    asyncio.run(play(steps))


async def play(steps: Sequence[tuple[str, int, int]]) -> None:
    gateway = Recording.over(fakeredis.FakeAsyncRedis(version=(7,), protocol=2))
    assert isinstance(gateway, Recording)
    gateway.calls = []
    game = Play(gateway)
    await game.open()
    await game.follow()
    for act, which, kind in steps:
        await getattr(game, act)(which, kind)
        await game.check()
    await game.pass_time(12, 0)
    await game.store.publish([POOL, SERIAL], "app", starts=False)
    left = [await gateway.command("ZCARD", game.keys.holders(*place)) for place in list(game.model.tokens)]
    assert left == [0] * len(left), "no token outlives its time"
    await gateway.close()
