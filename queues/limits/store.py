"""Tokens of limits in Redis: taken, renewed and released; holds; the definitions that scripts read.

The scripts say what each act does, and what is left if its process dies: take_limits.lua, release_limits.lua,
renew_limits.lua, hold_limit.lua, publish_limit.lua.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple

from ..envelope import NO_KEY, LimitUse
from ..errors import DecryptionError
from ..keys import Namespace, Partition, check_name, is_name
from ..security.encryption import TaskCipher
from ..transport.gateway import Gateway
from ..transport.pipelining import Argument, Command
from ..transport.scripts import Script, milliseconds, pairs, queue_script
from .definition import Limit

TOKEN_LIFE: Final = 30.0
"""Seconds after which a token expires that nothing renews, by the virtual clock; a longer lease in place of it."""

MAX_NAMES: Final = 10_000
"""Largest number of limits of a namespace that are listed."""

MEMORY: Final = "memory"
"""First part of the waiters that a process wakes by itself; others name a place: `QUEUE/PARTITION/...`."""

MAX_LABEL: Final = 200
"""Most characters of the text of a key for people."""

_LABEL: Final = "limit key"

TAKE: Final = queue_script("take_limits")
RELEASE: Final = queue_script("release_limits")
RENEW: Final = queue_script("renew_limits")
HOLD: Final = queue_script("hold_limit")
PUBLISH: Final = queue_script("publish_limit")

BlockReason = Literal["running", "total", "rate", "cost", "hold", "open", "unknown"]
"""Reason for which a token was not given. unknown: no worker has published the limit."""

Outcome = Literal["", "ok", "error"]
"""End of a task as its breakers count it; empty for an end that they do not."""


def token_member(partition: Partition, task_id: str, nonce: str) -> str:
    """Return the name of a task's token.

    nonce: of the admission, else the entry of its message; `ENTRY.COUNT/SEQ` of a token within a delivery.
    """
    return f"{partition.queue}/{partition.index}/{task_id}/{nonce}"


class TokenPlace(NamedTuple):
    """Parts of the name of a token."""

    queue: str
    partition: int
    task_id: str
    nonce: str


def parse_member(member: str) -> TokenPlace | None:
    """Return the parts of the name of a token; None for what no part of Perdure wrote."""
    parts = member.split("/", 3)
    if len(parts) < 4 or not (parts[1].isascii() and parts[1].isdigit()):
        return None
    return TokenPlace(parts[0], int(parts[1]), parts[2], parts[3])


Token = tuple[str, Sequence[LimitUse]]
"""Name of a token, and the uses that it is for."""


class TakeRequest(NamedTuple):
    """Request of one token for all uses of a task, all or none.

    Attributes:
        member: Name of the token, see `token_member`.
        uses: At most four, each limit once.
        charge: Whether rate and cost are charged for what is newly taken. Not for a task that was admitted, whose mover
            has paid.
        waiter: What release returns as a hint, or publishes if it starts with `memory/`; empty for none.
        labels: Text of the key of each use for people; empty for none.
    """

    member: str
    uses: Sequence[LimitUse]
    charge: bool = True
    waiter: str = ""
    labels: Sequence[str] = ()


class TakeAnswer(NamedTuple):
    """Answer to one request.

    Attributes:
        granted: Whether the member holds all tokens now.
        held: Whether it held them before.
        use: Position of the use that blocked it.
        reason: Why; empty if it is granted.
        retry: Seconds after which to look again.
    """

    granted: bool
    held: bool = False
    use: int = 0
    reason: BlockReason | Literal[""] = ""
    retry: float = 0.0


class BreakerChange(NamedTuple):
    """Change of a breaker, for a log line.

    until: ms of Redis' clock until which it is open. calls, failed: those that were counted in its window.
    """

    limit: str
    state: Literal["open", "half-open", "closed"]
    until: int = 0
    calls: int = 0
    failed: int = 0


class Taken(NamedTuple):
    """Answers to requests, in order."""

    answers: list[TakeAnswer]
    changes: list[BreakerChange]


class ReleaseRequest(NamedTuple):
    """Release of a token.

    Attributes:
        outcome: What the breakers of its limits learn.
        actual: Cost by the name of the limit, in place of what was reserved.
    """

    member: str
    uses: Sequence[LimitUse]
    outcome: Outcome = ""
    actual: Mapping[str, int] = {}


class Released(NamedTuple):
    """Reply to releases.

    Attributes:
        hints: Waiters that may look now.
        gone: Positions of requests whose member held nothing.
        places: Limits and keys that may have room, if something waits for them.
        published: Number of waiters in memory that were notified.
    """

    hints: list[str]
    gone: list[int]
    changes: list[BreakerChange]
    places: Sequence[LimitUse] = ()
    published: int = 0

    @property
    def named(self) -> bool:
        """Whether it has named a waiter."""
        return bool(self.hints or self.published)


class TakenToken(NamedTuple):
    """TakenToken of a token. left: seconds until it expires, by the virtual clock."""

    member: str
    key: str
    left: float


class LimitView(NamedTuple):
    """A limit as people see it.

    Attributes:
        defined: Fields that workers have published, see `Limit.published`, with those that scripts write: `hold` (ms),
            and of the breaker `opened` (ms until which it is open), `probe`, `slot`, `c0`, `e0`, `c1`, `e1`.
        overrides: Fields that operators have set, with `hold`, `by` and `at`.
        now: Redis' clock in ms.
        holders: The first ones by their expiry, and how many there are.
        waiters: The first ones of those that wait for the total, and how many there are.
    """

    name: str
    defined: Mapping[str, str]
    overrides: Mapping[str, str]
    now: int
    holders: Sequence[TakenToken]
    held: int
    waiters: Sequence[str]
    waiting: int

    @property
    def revision(self) -> int:
        """Number of the changes by operators, as of the last one; 0 without any."""
        change = self.overrides.get("change", "")
        return int(change) if change.isascii() and change.isdigit() else 0


def renewal(
    namespace: Namespace, tokens: Sequence[Token], life: float = TOKEN_LIFE
) -> tuple[list[str], list[Argument]]:
    """Return keys and arguments of `RENEW`, for a thread that calls it itself. life: seconds.

    The reply is a list of the positions of tokens that are gone, wholly or in part.
    """
    args: list[Argument] = [_step(life), round(life * 1000)]
    for member, uses in tokens:
        args += (member, len(uses))
        for use in uses:
            args += (use.name, use.key)
    return [namespace.limits.clock], args


class LimitStore:
    """The limits of a namespace in Redis. life: seconds after which a token expires that nothing renews."""

    def __init__(self, gateway: Gateway, namespace: Namespace, life: float = TOKEN_LIFE) -> None:
        self._gateway = gateway
        self._namespace = namespace
        self._keys = namespace.limits
        self._life = life
        self._step = _step(life)

    async def publish(self, limits: Sequence[Limit], app: str, *, starts: bool) -> list[tuple[str, str]]:
        """Publish definitions, or renew those that are there; return limits that another app defines otherwise, and it.

        starts: whether the worker starts: its definition replaces an earlier one. A renewal does not.
        """
        if not limits:
            return []
        started: Argument = ""
        if starts:
            started = milliseconds(await self._gateway.command("TIME", node_of=self._keys.clock))
        args: list[Argument] = [self._step, app, started]
        for limit in limits:
            fields = limit.published()
            args += (limit.name, limit.digest, 2 * len(fields))
            for name, value in fields.items():
                args += (name, value)
        others: list[bytes] = await self._run(PUBLISH, args, lambda: [(limit.name, NO_KEY) for limit in limits])
        return [(limit.name, other.decode()) for limit, other in zip(limits, others, strict=True) if other]

    async def take(self, requests: Sequence[TakeRequest]) -> Taken:
        """Take tokens: for each request all of its uses or none, in order. A member that has them is renewed."""
        if not requests:
            return Taken([], [])
        args: list[Argument] = [self._step, round(self._life * 1000)]
        for member, uses, charge, waiter, labels in requests:
            args += (member, "1" if charge else "", waiter, len(uses))
            for number, use in enumerate(uses):
                label = self._label(use, labels[number]) if labels and labels[number] else b""
                args += (use.name, use.key, use.cost, label)
        found, probes = await self._run(TAKE, args, lambda: _used(request.uses for request in requests))
        answers = [_GRANTED if answer == 1 else _HELD if answer == 2 else _blocked(answer) for answer in found]
        return Taken(answers, [BreakerChange(name.decode(), "half-open") for name in probes])

    async def release(self, requests: Sequence[ReleaseRequest]) -> Released:
        """Release tokens. What holds nothing has no effect."""
        if not requests:
            return Released([], [], [])
        args: list[Argument] = []
        for member, uses, outcome, actual in requests:
            args += (member, outcome, len(uses))
            for use in uses:
                args += (use.name, use.key, use.cost, actual.get(use.name, "") if actual else "")
        hints, gone, changes, published = await self._run(
            RELEASE, args, lambda: _used(request.uses for request in requests)
        )
        changed = [
            BreakerChange(name.decode(), state.decode(), int(until), int(calls), int(failed))
            for name, state, until, calls, failed in zip(*(changes[start::5] for start in range(5)), strict=True)
        ]
        named = bool(hints or published)
        places = {(use.name, use.key): use for request in requests for use in request.uses} if named else {}
        return Released([hint.decode() for hint in hints], gone, changed, list(places.values()), published)

    async def offer(self, places: Sequence[LimitUse]) -> Released:
        """Return the next waiters of limits and keys that have room: the ones before them have left it free."""
        if not places:
            return Released([], [], [])
        return await self.release([ReleaseRequest("", places)])

    async def renew(self, tokens: Sequence[Token]) -> list[int]:
        """Renew tokens; return the positions of those that are gone, wholly or in part."""
        if not tokens:
            return []
        _, args = renewal(self._namespace, tokens, self._life)
        gone: list[int] = await self._run(RENEW, args, lambda: _used(uses for _, uses in tokens))
        return gone

    async def touch(self) -> None:
        """Move the virtual clock on. Without a call each third of a lease, tokens expire late."""
        await self._run(RENEW, (self._step, round(self._life * 1000)), list)

    async def hold(self, name: str, seconds: float) -> int:
        """Hold a limit; return until when, in ms of Redis' clock. A hold that ends later stays."""
        args = (check_name("limit", name), round(seconds * 1000))
        until: int = await self._run(HOLD, args, lambda: [(name, NO_KEY)])
        return until

    async def names(self) -> list[str]:
        """Return the names of the limits that workers have published, sorted."""
        members = await self._gateway.command("ZRANGE", self._keys.names, 0, MAX_NAMES - 1)
        return sorted(name for member in members if is_name(name := member.decode("utf-8", "replace")))

    async def read(self, names: Sequence[str], *, most: int = 100) -> list[LimitView]:
        """Return limits as people see them. most: holders and waiters of each."""
        keys = self._keys
        stored, time = await self._gateway.pipeline([("GET", keys.clock), ("TIME",)], node_of=keys.clock)
        now = milliseconds(time)
        virtual = _virtual(stored, now, self._step)
        reads: list[Command] = []
        for name in names:
            reads += (
                ("HGETALL", keys.limit(name)),
                ("HGETALL", keys.control(name)),
                ("ZRANGEBYSCORE", keys.holders(name), f"({virtual}", "+inf", "WITHSCORES", "LIMIT", 0, most),
                ("ZCOUNT", keys.holders(name), f"({virtual}", "+inf"),
                ("ZRANGE", keys.waiters(name), 0, most - 1),
                ("ZCARD", keys.waiters(name)),
            )
        found = await self._gateway.pipeline(reads)
        views = []
        for number, name in enumerate(names):
            defined, overrides, held, count, waiting, waiters = found[number * 6 : number * 6 + 6]
            holders = [_holder(member, score, virtual) for member, score in pairs(held).items()]
            fields = (_texts(defined), _texts(overrides))
            shown = [waiter.decode("utf-8", "replace") for waiter in waiting]
            views.append(LimitView(name, *fields, now, holders, count, shown, waiters))
        return views

    async def labels(self, places: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
        """Return the texts of keys for people, of those that are known. places: limits and keys."""
        found = await self._gateway.pipeline([("GET", self._keys.label(name, key)) for name, key in places])
        texts: dict[tuple[str, str], str] = {}
        for place, data in zip(places, found, strict=True):
            if data is not None:
                with suppress(DecryptionError, ValueError):
                    texts[place] = self._cipher(*place).decrypt(_LABEL, data).decode()
        return texts

    def _label(self, use: LimitUse, text: str) -> bytes:
        return self._cipher(use.name, use.key).encrypt(_LABEL, text[:MAX_LABEL].encode())

    def _cipher(self, name: str, key: str) -> TaskCipher:
        return self._gateway.encryptor.of(self._keys.place, f"{name}:{key}")

    async def _run(
        self, script: Script, args: Sequence[Argument], uses: Callable[[], Iterable[tuple[str, str]]]
    ) -> Any:
        """Execute a script. uses: returns limits and keys that it may read."""
        return await self._gateway.run(script, [self._keys.clock], args, lambda: self._keys.of_uses(uses()))


_GRANTED: Final = TakeAnswer(granted=True)
_HELD: Final = TakeAnswer(granted=True, held=True)


def _blocked(answer: Sequence[Any]) -> TakeAnswer:
    use, reason, retry = answer
    return TakeAnswer(False, False, use, reason.decode(), retry / 1000)


def _used(uses: Iterable[Sequence[LimitUse]]) -> list[tuple[str, str]]:
    return [(use.name, use.key) for each in uses for use in each]


def _step(life: float) -> int:
    """Return the largest step of the virtual clock in ms: half of the life of a token, or of the shortest usual one."""
    return max(1, round(min(life, TOKEN_LIFE) * 500))


def _virtual(stored: bytes | None, now: int, step: int) -> int:
    """Return the time of the virtual clock, as limits.lua does."""
    try:
        seen, virtual, least, ends = map(int, (stored or b"").split())
    except ValueError:
        return now
    return virtual + max(0, min(now - seen, least if now < ends else step))


def _holder(member: bytes, score: bytes, virtual: int) -> TakenToken:
    key, _, name = member.decode("utf-8", "replace").partition("/")
    return TakenToken(name, key, (float(score) - virtual) / 1000)


def _texts(flat: Any) -> dict[str, str]:
    fields = flat if isinstance(flat, dict) else pairs(flat)
    return {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, value in fields.items()}
