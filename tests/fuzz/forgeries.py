"""Seeded forgeries: what a writer without the key, who knows all formats, writes into sealed data.

The writer has read all keys at several moments (`Stored`), and has the keys of the same tasks in a deployment without
encryption: the shapes of all values. Forgery N of a seed has its place, act and choices from `Random(f"{seed}:{N}")`.
A forged text has the mark `FORGED-N`.

| act | what is written |
|---|---|
| copy | a sealed value of another field, entry or key, in place of the value |
| swap | two values or entries in each other's place |
| older | the value that the field had before |
| plain | the value as it would be stored without a key |
| hurt | the sealed value, cut or with another bit |
| count | another number or time |
| add | one more field, member, entry |
| rename | another name, type or place in what is plain |
| cut | without an entry of a log, or a field of a checkpoint |
| attack | several commands that fit each other |

Not written, because no key can prevent it and docs/how-to/security.md says so: deleted keys, endless scripts, more data
than fits into memory, and older copies: of all keys of a task, a session or the server, and of one entry of the store,
one named value or one file of a shared workspace, which several programs write. Not written either: the fields of the
deployment that stop all its processes on purpose, and the rows that the lists are searched for.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import redis.asyncio
from redis.exceptions import ResponseError

from tests.fuzz.mutations import Mutation
from tests.fuzz.places import Place

__all__ = ["ACTS", "FORGED", "UNTOUCHED", "Forger", "Forgery", "Stored", "draw_forgery", "read_stored"]

Command = list[bytes | str | int | float]
Fields = dict[bytes, bytes]
Entries = list[tuple[bytes, Fields]]
Stored = dict[bytes, Any]
"""Content of each key: a dict of a hash, a list of entries of a stream, a dict of members and scores, and so on."""

FORGED: Final = "FORGED-"
UNTOUCHED: Final = b"untouched"
"""Part of the ids of what no forgery changes."""

ACTS: Final[Mapping[str, int]] = {
    "copy": 8,
    "swap": 4,
    "older": 4,
    "plain": 8,
    "hurt": 3,
    "count": 4,
    "add": 6,
    "rename": 4,
    "cut": 1,
    "attack": 8,
}
"""Kinds of forgeries, with their weights."""

WEIGHTS: Final[Mapping[str, int]] = {
    "Partition.record": 14,
    "Partition.steps": 14,
    "Partition.log": 14,
    "Partition.inbox": 12,
    "Partition.ready": 6,
    "Partition.stream": 4,
    "Partition.dead": 4,
    "Partition.join_keys": 6,
    "Partition.upload": 2,
    "SessionPartition.session": 14,
    "SessionPartition.history": 6,
    "Namespace.schedule": 3,
    "Namespace.token": 3,
    "Namespace.unique": 2,
    "Namespace.store.entries": 5,
    "Namespace.store.value": 3,
}
"""Weights of the places that hold values; any other place has the weight 1."""

_DRAWS: Final = 30
"""Draws until one changes something."""

_TRUTH: Final = re.compile(rb"[a-z0-9 ]+ of [\w.-]+")
_DENIALS: Final = frozenset({b"format", b"change"})
"""Fields that stop a whole deployment on purpose."""


@dataclass(frozen=True, slots=True)
class Forgery(Mutation):
    """A forgery before it is applied. seed: of the run."""

    seed: int

    @property
    def mark(self) -> bytes:
        return f"{FORGED}{self.number}".encode()


@dataclass(slots=True)
class Applied:
    """A forgery that was applied: its commands, and the keys that they wrote to."""

    forgery: Forgery
    commands: str = ""
    keys: list[bytes] = field(default_factory=list)

    def __str__(self) -> str:
        made = self.forgery
        return f"FUZZ_ONLY={made.number}: {made.place.name}, {made.act}: {self.commands or 'nothing to change'}"


def draw_forgery(seed: int, number: int, places: Sequence[Place], again: int = 0) -> Forgery:
    """Return forgery `number` of a seed. again: how many draws before made nothing of what is stored."""
    dice = random.Random(f"{seed}:{number}:{again}")
    place = dice.choices(places, [WEIGHTS.get(place.name, 1) for place in places])[0]
    act = dice.choices(list(ACTS), list(ACTS.values()))[0]
    return Forgery(number, place, act, f"{seed}:{number}:{again}:choices", seed)


async def read_stored(client: Any, namespace: str) -> Stored:
    """Return the content of all keys of a namespace."""
    keys: set[bytes] = set()
    for pattern in (f"{{{namespace}:*", f"{{{namespace}}}:*"):
        keys |= {key async for key in client.scan_iter(pattern, count=1000)}
    return await read_keys(client, sorted(keys))


async def read_keys(client: Any, keys: Sequence[bytes]) -> Stored:
    """Return the content of keys; keys that do not exist are left out."""
    async with client.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.type(key)
        types = await pipeline.execute()
        known = [(key, kind) for key, kind in zip(keys, types, strict=True) if kind != b"none"]
        for key, kind in known:
            _READ[kind](pipeline, key)
        found = await pipeline.execute(raise_on_error=False)
    return {
        key: dict(value) if kind == b"zset" else sorted(value) if kind == b"set" else value
        for (key, kind), value in zip(known, found, strict=True)
        if not isinstance(value, Exception)
    }


_READ: Final[Mapping[bytes, Callable[[Any, bytes], Any]]] = {
    b"hash": lambda pipeline, key: pipeline.hgetall(key),
    b"stream": lambda pipeline, key: pipeline.xrange(key),
    b"zset": lambda pipeline, key: pipeline.zrange(key, 0, -1, withscores=True),
    b"string": lambda pipeline, key: pipeline.get(key),
    b"list": lambda pipeline, key: pipeline.lrange(key, 0, -1),
    b"set": lambda pipeline, key: pipeline.smembers(key),
}


SEALED: Final = b"\xc1\x01"
"""Start of sealed data, which no text contains."""


def is_sealed(value: bytes) -> bool:
    """Return whether a value is, or ends with, sealed data."""
    return SEALED in value


class Forger:
    """Applies forgeries to a namespace over a connection of its own.

    Attributes:
        past: The keys at earlier moments, oldest first.
        plain: The keys of the same tasks in the namespace `twin`, without encryption.
    """

    def __init__(
        self, client: redis.asyncio.Redis, namespace: str, places: Sequence[Place], twin: str, plain: Stored
    ) -> None:
        self._places = places
        self._client: Any = client  # its types are of all its modes at once
        self._namespace, self._twin = namespace.encode(), twin.encode()
        self.plain = {key.replace(self._twin, self._namespace): value for key, value in plain.items()}
        self.past: list[Stored] = []
        self.now: Stored = {}

    async def read(self) -> None:
        """Read all keys: what was read before becomes the past."""
        if self.now:
            self.past.append(self.now)
        self.now = await read_stored(self._client, self._namespace.decode())

    async def apply(self, forgery: Forgery) -> Applied:
        """Apply a forgery, and return it with what was written. Where it makes no sense, another is drawn."""
        commands: list[Command] = []
        for again in range(1, _DRAWS):
            found = _Choice(self, forgery, random.Random(forgery.dice))
            if commands := found.attack() if forgery.act == "attack" else found.single():
                break
            forgery = draw_forgery(forgery.seed, forgery.number, self._places, again)
        applied = Applied(forgery)
        if not commands:
            return applied
        applied.keys = sorted({bytes(_encoded(command[1])) for command in commands})
        try:
            async with self._client.pipeline(transaction=True) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                await pipeline.execute()
        except ResponseError as error:  # such as an entry id that is not the largest one
            applied.commands = f"refused: {error}"
        known = {(key, entry) for key in applied.keys for entry in _known_entries(self.now.get(key))}
        shown = [command for command in commands if (command[1], tuple(command[2:])) not in known]
        applied.commands += " + ".join(" ".join(_shown(part) for part in command) for command in shown)[:900]
        self.now |= await read_keys(self._client, applied.keys)
        return applied


def _encoded(part: bytes | str | int | float) -> bytes:
    return part if isinstance(part, bytes) else str(part).encode()


def _known_entries(content: Any) -> list[tuple[bytes, ...]]:
    """Return the entries of a stream as they are in commands."""
    entries = content if isinstance(content, list) and content and isinstance(content[0], tuple) else []
    return [(entry, *_flat(fields)) for entry, fields in entries]


def _shown(part: bytes | str | int | float) -> str:
    text = _encoded(part)
    if is_sealed(text):
        return f"{text[: text.index(SEALED)].decode('utf-8', 'replace')}(sealed {text[-4:].hex()})"
    return (text[:100].decode("utf-8", "backslashreplace")) + ("..." if len(text) > 100 else "")


class _Choice:
    """The choices of one forgery."""

    def __init__(self, forger: Forger, forgery: Forgery, dice: random.Random) -> None:
        self._forger, self._forgery, self._dice = forger, forgery, dice
        self._now = forger.now

    # one value

    def single(self) -> list[Command]:
        """Return the commands that change one value of the place; none where the act makes no sense."""
        place, keys = self._forgery.place, self._keys()
        if not keys:
            return self._new_key(place)
        key = self._dice.choice(keys)
        content = self._now[key]
        match place.type:
            case "hash" if isinstance(content, dict):
                return self._hash(key, content)
            case "stream" if isinstance(content, list):
                return self._stream(key, content)
            case "zset" if isinstance(content, dict):
                return self._zset(key, content)
            case "string" if isinstance(content, bytes):
                return self._string(key, content)
        return []

    def _keys(self) -> list[bytes]:
        known = [key for key in sorted(self._now) if UNTOUCHED not in key]
        return _keys_of(self._forgery.place, known)

    def _new_key(self, place: Place) -> list[Command]:
        """Return the commands that create a key of the place with what it has in the plain deployment."""
        shapes = _keys_of(place, sorted(self._forger.plain))
        if not shapes or place.name.endswith("lock"):
            return []
        key = self._dice.choice(shapes)
        return _written(key, self._marked(self._forger.plain[key]))

    def _marked(self, content: Any) -> Any:
        """Return plain content with forged texts."""
        if isinstance(content, bytes):
            return _TRUTH.sub(self._forgery.mark, content)
        if isinstance(content, dict):
            return {self._marked(name): self._marked(value) for name, value in content.items()}
        if isinstance(content, (list, tuple)):
            return type(content)(self._marked(one) for one in content)
        return content

    def _hash(self, key: bytes, fields: Fields) -> list[Command]:  # noqa: PLR0911 - one per act
        dice, act = self._dice, self._forgery.act
        usable = sorted(name for name in fields if name not in _DENIALS and UNTOUCHED not in name + fields[name])
        sealed = [name for name in usable if is_sealed(fields[name])]
        numbers = [name for name in usable if fields[name].isdigit()]
        texts = [name for name in usable if name not in sealed and name not in numbers]
        if act == "add":
            return self._more_fields(key, fields)
        chosen = numbers if act == "count" else texts if act == "rename" else sealed
        chosen = chosen or usable
        if not chosen:
            return []
        name = dice.choice(chosen)
        value = fields[name]
        if act == "cut":
            return [["HDEL", key, name]] if key.find(b"}:steps:") > 0 else []
        if act == "swap":
            others = [one for one in chosen if one != name]
            if others and dice.random() < 0.5:
                other = dice.choice(others)
                return [["HSET", key, name, fields[other], other, value]]
            if mates := [one for one in self._keys() if one != key and name in self._now[one]]:
                mate = dice.choice(mates)
                return [["HSET", key, name, self._now[mate][name]], ["HSET", mate, name, value]]
            return []
        changed = self._value(value, key, name)
        return [] if changed is None or changed == value else [["HSET", key, name, changed]]

    def _value(self, value: bytes, key: bytes, name: bytes) -> bytes | None:  # noqa: PLR0911 - one per act
        """Return what to write in place of a value of a field."""
        dice = self._dice
        match self._forgery.act:
            case "copy":
                return self._copied(value, self._donors(name))
            case "older":
                before = [past[key][name] for past in self._forger.past if name in (past.get(key) or {})]
                return dice.choice(different) if (different := [one for one in before if one != value]) else None
            case "plain":
                shapes = self._shapes(key, name)
                return self._head(value) + self._marked(self._tail(dice.choice(shapes), value)) if shapes else None
            case "hurt":
                return _hurt(value, dice)
            case "count":
                return self._number(value)
            case "rename":
                donors = [other for other in self._donors(name) if not is_sealed(other) and other != value]
                return dice.choice(donors) if donors else None
        return None

    def _copied(self, value: bytes, donors: Sequence[bytes]) -> bytes | None:
        """Return a donor's sealed part after the plain head of the value, or the whole donor."""
        donors = [one for one in donors if one != value]
        if not donors:
            return None
        donor = self._dice.choice(donors)
        if is_sealed(value) and is_sealed(donor) and self._dice.random() < 0.7:
            return self._head(value) + donor[donor.index(SEALED) :]
        return donor

    @staticmethod
    def _head(value: bytes) -> bytes:
        at = value.find(SEALED)
        return value[:at] if at > 0 else b""

    @staticmethod
    def _tail(shape: bytes, value: bytes) -> bytes:
        """Return the shape without the words that the value has before its sealed part."""
        words = value[: max(value.find(SEALED), 0)].count(b" ")
        return shape.split(b" ", words)[-1] if words else shape

    def _donors(self, name: bytes) -> list[bytes]:
        """Return values to copy: mostly of the same field of other keys, else any sealed value of any key and time."""
        roll = self._dice.random()
        moments = [self._now, *self._forger.past] if roll < 0.3 else [self._now]
        same: list[bytes] = []
        sealed: list[bytes] = []
        for moment in moments:
            for content in moment.values():
                if isinstance(content, dict):
                    for other, value in content.items():
                        if not isinstance(value, bytes):
                            continue
                        if other == name:
                            same.append(value)
                        if is_sealed(value):
                            sealed.append(value)
                elif isinstance(content, list):
                    for entry in content:
                        if isinstance(entry, tuple):
                            sealed += [value for value in entry[1].values() if is_sealed(value)]
                            same += [value for other, value in entry[1].items() if other == name]
        return same if (same and 0.15 < roll < 0.85) else (sealed or same)

    def _shapes(self, key: bytes, name: bytes) -> list[bytes]:
        """Return plain values of a field: of the same key, else of any key."""
        own = self._forger.plain.get(key)
        if isinstance(own, dict) and isinstance(own.get(name), bytes) and self._dice.random() < 0.8:
            return [own[name]]
        kind = name.partition(b":")[0]
        found = []
        for content in self._forger.plain.values():
            entries = [content] if isinstance(content, dict) else []
            if isinstance(content, list):
                entries = [entry[1] for entry in content if isinstance(entry, tuple)]
            for fields in entries:
                found += [
                    value
                    for other, value in fields.items()
                    if isinstance(value, bytes) and (other == name or other.partition(b":")[0] == kind)
                ]
        return found

    def _number(self, value: bytes) -> bytes | None:
        if not value.isdigit():
            return None
        number = int(value)
        steps = (1, -1, 2, -2, -number, 10, 1000, 3_600_000, -3_600_000)
        return str(max(0, number + self._dice.choice(steps))).encode()

    def _more_fields(self, key: bytes, fields: Fields) -> list[Command]:
        """Return the command that adds a field: a plain one of the twin, or a sealed one under a new name."""
        dice = self._dice
        names = [name for name in fields if is_sealed(fields[name])]
        mates = [self._now[one] for one in self._keys() if one != key and isinstance(self._now[one], dict)]
        if dice.random() < 0.5 and names:
            name = dice.choice(sorted(names))
            return [["HSET", key, _next_name(name, fields), fields[name]]]
        plain = [self._forger.plain.get(key), *(self._forger.plain.get(one) for one in self._keys())]
        sources = mates if dice.random() < 0.5 else [one for one in plain if isinstance(one, dict)]
        new = [(name, value) for source in sources for name, value in source.items() if name not in fields | {b"": b""}]
        new = [(name, value) for name, value in new if name not in _DENIALS and isinstance(value, bytes)]
        if not new:
            return []
        name, value = dice.choice(sorted(new))
        return [["HSET", key, name, self._marked(value) if not is_sealed(value) else value]]

    def _stream(self, key: bytes, entries: Entries) -> list[Command]:  # noqa: PLR0911 - one per act
        dice, act = self._dice, self._forgery.act
        usable = [at for at, (_, fields) in enumerate(entries) if UNTOUCHED not in b"".join(fields.values())]
        if act == "add":
            return self._more_entries(key, entries)
        if not usable:
            return []
        at = dice.choice(usable)
        entry, fields = entries[at]
        if act == "cut":
            return [["XDEL", key, entry]] if b"}:log:" in key else []
        if act == "swap":
            others = [one for one in usable if one != at]
            if not others:
                return []
            other = dice.choice(others)
            changed = list(entries)
            changed[at], changed[other] = (entry, entries[other][1]), (entries[other][0], fields)
            return _rewritten(key, entries, changed)
        sealed = [name for name, value in fields.items() if is_sealed(value)]
        numbers = [name for name, value in fields.items() if value.isdigit()]
        texts = [name for name in fields if name not in sealed and name not in numbers]
        chosen = (numbers if act == "count" else texts if act == "rename" else sealed) or list(fields)
        name = dice.choice(sorted(chosen))
        value: bytes | None
        if act == "older":  # of the same field of an entry before
            before = [one[name] for _, one in entries[:at] if name in one]
            value = dice.choice(before) if before else None
        else:
            value = self._value(fields[name], key, name)
        if value is None or value == fields[name]:
            return []
        changed = list(entries)
        changed[at] = entry, {**fields, name: value}
        return _rewritten(key, entries, changed)

    def _more_entries(self, key: bytes, entries: Entries) -> list[Command]:
        """Return the command that adds an entry: one of the twin with forged texts, or a copy of any."""
        dice = self._dice
        place = self._forgery.place
        shapes: list[Fields] = []
        for one in [key, *_keys_of(place, sorted(self._forger.plain))]:
            content = self._forger.plain.get(one)
            if isinstance(content, list):
                shapes += [self._marked(entry[1]) for entry in content if isinstance(entry, tuple)]
        copies = [fields for _, fields in entries]
        for one in self._keys():
            copies += [fields for _, fields in self._now[one]] if isinstance(self._now[one], list) else []
        fields = dice.choice(sources) if (sources := copies if dice.random() < 0.5 else shapes or copies) else None
        if not fields or UNTOUCHED in b"".join(fields.values()):
            return []
        if b"n" in fields and dice.random() < 0.7:
            numbers = [int(one[b"n"]) for _, one in entries if one.get(b"n", b"").isdigit()]
            fields = {**fields, b"n": str(max(numbers, default=0) + 1).encode()}
        return [_added(key, fields)]

    def _zset(self, key: bytes, members: Mapping[bytes, float]) -> list[Command]:
        dice = self._dice
        usable = sorted(member for member in members if UNTOUCHED not in member)
        if self._forgery.act in ("add", "copy", "plain", "rename", "attack") or not usable:
            others = [
                member
                for content in [*self._now.values(), *self._forger.plain.values()]
                if isinstance(content, dict)
                for member, score in content.items()
                if isinstance(score, float) and member not in members and UNTOUCHED not in member
            ]
            if not others:
                return []
            return [["ZADD", key, dice.choice(list(members.values()) or [0.0]), dice.choice(sorted(others))]]
        member = dice.choice(usable)
        if self._forgery.act == "swap" and len(usable) > 1:
            other = dice.choice([one for one in usable if one != member])
            return [["ZADD", key, members[member], other, members[other], member]]
        score = members[member] + dice.choice((-1, 1, -3_600_000, 3_600_000, -members[member]))
        return [["ZADD", key, score, member]]

    def _string(self, key: bytes, value: bytes) -> list[Command]:
        if self._forgery.place.name.endswith("lock"):
            return []  # a lock that is held for ever delays for ever
        others = [self._now[one] for one in self._keys() if one != key]
        others = [one for one in others if isinstance(one, bytes)]
        match self._forgery.act:
            case "copy" | "swap" | "add" | "rename" | "older" | "cut" | "attack":
                new = self._dice.choice(others) if others else None
            case "plain":
                shape = self._forger.plain.get(key)
                new = self._marked(shape) if isinstance(shape, bytes) else None
            case "count":
                new = self._number(value)
            case _:
                new = _hurt(value, self._dice)
        return [] if new is None or new == value else [["SET", key, new, "KEEPTTL"]]

    # several commands that fit each other

    def attack(self) -> list[Command]:
        """Return the commands of an attack, which need each other; those of one value if none is possible here."""
        attacks = [self._result, self._next_event, self._next_message, self._answer, self._task]
        attacks += [self._shorter, self._fresh, self._earlier] * 2
        self._dice.shuffle(attacks)
        if self._forgery.place.name.startswith("SessionPartition"):
            attacks = [self._turn]
        for made in attacks:
            if commands := made():
                return commands
        return self.single()

    def _of_kind(self, kind: bytes) -> list[bytes]:
        return [key for key in sorted(self._now) if b"}:" + kind + b":" in key and UNTOUCHED not in key]

    def _beside(self, key: bytes, kind: bytes, other: bytes) -> bytes:
        return key.replace(b"}:" + kind + b":", b"}:" + other + b":", 1)

    def _result(self) -> list[Command]:
        """Let a task end with the result of another one, or a plain one."""
        if not (records := self._of_kind(b"record")):
            return []
        key = self._dice.choice(records)
        results = [fields[b"result"] for one in records if b"result" in (fields := self._now[one])]
        value = self._dice.choice(results) if results and self._dice.random() < 0.5 else b'"%b"' % self._forgery.mark
        ended: Command = ["HSET", key, "state", "succeeded", "finished", self._moment()]
        return [ended if self._dice.random() < 0.2 else [*ended, "result", value]]

    def _next_event(self) -> list[Command]:
        """Add an event with the next number to a log, and count it."""
        logs = self._of_kind(b"log")
        if not logs:
            return []
        key = self._dice.choice(logs)
        record = self._beside(key, b"log", b"record")
        number = int(self._now.get(record, {}).get(b"events", b"0"))
        shapes = [fields for one in self._of_kind(b"log") for _, fields in self._now[one] if b"n" in fields]
        plain = [fields for one, content in self._forger.plain.items() if b"}:log:" in one for _, fields in content]
        shapes = shapes if self._dice.random() < 0.4 else [self._marked(fields) for fields in plain if b"n" in fields]
        if not shapes:
            return []
        fields = {**self._dice.choice(shapes), b"n": str(number + 1).encode()}
        commands: list[Command] = [_added(key, fields)]
        if b"e" in fields:
            entries = int(self._now.get(record, {}).get(b"entries", b"0"))
            commands = [_added(key, {**fields, b"e": str(entries + 1).encode()})]
            commands.append(["HSET", record, "entries", entries + 1])
        return [*commands, ["HSET", record, "events", number + 1]]

    def _shorter(self) -> list[Command]:
        """Cut the last events off a log, lower the counters to what is left, and perhaps put back older records."""
        logs = [key for key in self._of_kind(b"log") if any(b"n" in fields for _, fields in self._now[key])]
        if not logs:
            return []
        key = self._dice.choice(logs)
        numbered = [(entry, fields) for entry, fields in self._now[key] if b"n" in fields]
        keep = self._dice.randrange(len(numbered))
        commands: list[Command] = [["XDEL", key, entry] for entry, _ in numbered[keep:]]
        record = self._beside(key, b"log", b"record")
        last = numbered[keep - 1][1] if keep else {}
        commands.append(["HSET", record, "events", last.get(b"n", b"0")])
        if b"e" in last and self._dice.random() < 0.3:
            commands.append(["HSET", record, "entries", last[b"e"]])
        return commands + (self._put_back(self._beside(key, b"log", b"steps")) if self._dice.random() < 0.5 else [])

    def _fresh(self) -> list[Command]:
        """Say that the task was replayed without its checkpoint."""
        if not (logs := self._of_kind(b"log")):
            return []
        key = self._dice.choice(logs)
        commands: list[Command] = [["XADD", key, "*", "type", "replayed", "data", '{"fresh":true}']]
        if self._dice.random() < 0.5:
            commands.append(["HSET", self._beside(key, b"log", b"record"), "events", 0])
        return commands

    def _earlier(self) -> list[Command]:
        """Put back older values of several fields of one key."""
        kind = self._dice.choice((b"steps", b"record", b"inbox", b"join"))
        keys = [key for key in self._of_kind(kind) if any(past.get(key) for past in self._forger.past)]
        return self._put_back(self._dice.choice(keys)) if keys else []

    def _put_back(self, key: bytes) -> list[Command]:
        """Return the command that puts back some of the older values of a hash; not all, which is an older copy."""
        past = self._dice.choice(self._forger.past).get(key) if self._forger.past else None
        now = self._now.get(key)
        if not isinstance(past, dict) or not isinstance(now, dict):
            return []
        changed = [(name, past[name]) for name in sorted(past) if now.get(name) != past[name]]
        chosen = self._dice.sample(changed, self._dice.randint(1, len(changed))) if changed else []
        return [["HSET", key, *[part for pair in chosen for part in pair]]] if chosen else []

    def _next_message(self) -> list[Command]:
        """Deliver a message once more, or a plain one, and wake the task."""
        found = []
        for moment in (self._now, *self._forger.past):
            for key in self._of_kind(b"inbox"):
                names = [name for name in moment.get(key, {}) if name.startswith(b"m:")]
                found += [(key, moment[key][name]) for name in names]
        if not found:
            return []
        key, value = self._dice.choice(sorted(found))
        if self._dice.random() < 0.4:
            plain = b'{"id":"x","sender":"ada","content":"%b"}' % self._forgery.mark
            value = self._head(value) + plain
        if self._dice.random() < 0.3:
            key = self._dice.choice(self._of_kind(b"inbox"))
        inbox = self._now.get(key, {})
        sent, last = int(inbox.get(b"sent", b"0")), int(inbox.get(b"last", b"0"))
        digest = b"%024x" % self._dice.getrandbits(90)
        new = last + 1
        fields: Command = [f"m:{new}", value, f"n:{sent + 1}", b"%d %b" % (new, digest), "id:" + digest.decode(), new]
        return [["HSET", key, *fields, "sent", sent + 1, "last", new], *self._due(key, b"inbox")]

    def _answer(self) -> list[Command]:
        """Answer an open wait with an answer of another wait, task or time, or a plain one, and wake the task."""
        waits, answers = [], []
        for key in self._of_kind(b"inbox"):
            waits += [(key, name) for name in self._now[key] if name.startswith(b"w:")]
        for moment in (self._now, *self._forger.past):
            for key in self._of_kind(b"inbox"):
                answers += [
                    value for name, value in moment.get(key, {}).items() if name.startswith(b"a:") or name[:2] == b"e:"
                ]
        if not waits or not answers:
            return []
        key, name = self._dice.choice(sorted(waits))
        value = self._dice.choice(answers)
        if self._dice.random() < 0.4:
            value = self._head(value) + b'{"value":"%b","by":"ada"}' % self._forgery.mark
        field = b"a:" + name[2:] if self._dice.random() < 0.8 else b"e:" + name[2:].partition(b"#")[0]
        return [["HSET", key, field, value], *self._due(key, b"inbox")]

    def _turn(self) -> list[Command]:
        """Claim a turn with a message that was sent before, or a plain one; perhaps of another agent."""
        sessions = self._of_kind(b"session")
        messages = [
            value
            for moment in (self._now, *self._forger.past)
            for key in sessions
            for name, value in moment.get(key, {}).items()
            if name.startswith(b"m:")
        ]
        for key in self._of_kind(b"history"):
            messages += [fields[b"message"] for _, fields in self._now[key] if b"message" in fields]
        if not messages:
            return []
        key = self._dice.choice(sessions)
        fields, value = self._now[key], self._dice.choice(messages)
        if self._dice.random() < 0.3:
            value = self._head(value) + b'{"sender":"","content":"%b"}' % self._forgery.mark
        turn, now = int(fields.get(b"turn", b"0")), self._moment()
        number = turn if self._dice.random() < 0.4 else turn + 1
        changed: Command = ["HSET", key, f"m:{number}", value]
        if number > turn:
            changed += ["turn", number, "sent", max(number, int(fields.get(b"sent", b"0"))), "claimed", now - 120_000]
            changed += ["ended", turn] if self._dice.random() < 0.5 else []
        if self._dice.random() < 0.3:
            changed += ["agent", self._dice.choice(("brief", "steps", "thinker")), "queue", "sealed"]
        tag, _, rest = key.partition(b"}:")
        return [changed, ["ZADD", tag + b"}:due", 1, rest.partition(b":")[2]]]

    def _task(self) -> list[Command]:
        """Put a message on the queue: plain arguments, or sealed ones of another task, name or time."""
        records = self._of_kind(b"record")
        ready = [key for key in sorted(self._now) if key.endswith(b"}:ready") and b":sealed:" in key]
        found = [(one, fields) for one in records if b"args" in (fields := self._now[one])]
        if not ready or not found:
            return []
        key, fields = self._dice.choice(found)
        task_id = key.rpartition(b"}:record:")[2]
        if self._dice.random() < 0.5:
            task_id += b"-%d" % self._forgery.number
        name = fields.get(b"task", b"steps") if self._dice.random() < 0.6 else self._dice.choice((b"brief", b"steps"))
        plain = self._dice.random() < 0.5
        args = b'{"text":"%b"}' % self._forgery.mark if plain else self._dice.choice(found)[1][b"args"]
        envelope = b'{"v":1,"id":"%b","task":"%b"}' % (task_id, name)
        return [["XADD", ready[0], "*", "env", envelope, "args", args, *(["again", "1"] * (self._dice.random() < 0.4))]]

    def _due(self, key: bytes, kind: bytes) -> list[Command]:
        tag, _, task_id = key.partition(b"}:" + kind + b":")
        return [["ZADD", tag + b"}:due", 1, task_id]]

    def _moment(self) -> int:
        """Return a time near those that are stored."""
        times = [
            int(fields[name])
            for fields in self._now.values()
            if isinstance(fields, dict)
            for name in (b"at", b"claimed")
            if isinstance(fields.get(name), bytes) and fields[name].isdigit()
        ]
        return max(times, default=1)


def _keys_of(place: Place, known: Sequence[bytes]) -> list[bytes]:
    """Return the known keys of a kind, in all partitions of sessions, tokens, unique keys and budgets."""
    start = re.sub(rb"(:\\?~\w+:)0(?=\\})", rb"\1\\d+", re.escape(place.key))
    pattern = re.compile(start + (rb".+" if place.named else b""), re.DOTALL)
    return [key for key in known if pattern.fullmatch(key)]


def _flat(fields: Fields) -> list[bytes]:
    return [part for pair in fields.items() for part in pair]


def _hurt(value: bytes, dice: random.Random) -> bytes:
    if not value:
        return b"\xc1"
    at = dice.randrange(len(value))
    if dice.random() < 0.4:
        return value[:at]
    return value[:at] + bytes([value[at] ^ (1 << dice.randrange(8))]) + value[at + 1 :]


def _next_name(name: bytes, fields: Fields) -> bytes:
    """Return the name of a field that the key does not have, with the next number, or another letter before it."""
    head, colon, number = name.rpartition(b":")
    if number.isdigit():
        numbers = [int(rest) for one in fields if (rest := one.rpartition(b":")[2]).isdigit() and one.startswith(head)]
        return head + colon + str(max(numbers) + 1).encode()
    if colon and len(head) == 1:
        return {b"d": b"s", b"s": b"d", b"a": b"e"}.get(head, b"d") + colon + number
    return name + b"#2"


def _rewritten(key: bytes, entries: Entries, changed: Entries) -> list[Command]:
    """Return the commands that give a stream other entries. A queue keeps its group: its new entries come last."""
    if key.endswith(b"}:ready"):
        new = [one for one in changed if one not in entries]
        removed: list[Command] = [["XDEL", key, entry] for entry, fields in entries if (entry, fields) not in changed]
        return [*(_added(key, fields) for _, fields in new), *removed]
    emptied: Command = ["DEL", key]
    return [emptied, *(_added(key, fields, entry) for entry, fields in changed if fields)]


def _added(key: bytes, fields: Fields, entry: bytes = b"*") -> Command:
    return ["XADD", key, entry, *_flat(fields)]


def _written(key: bytes, content: Any) -> list[Command]:
    """Return the commands that store the content of a key that does not exist."""
    match content:
        case dict() if content and all(isinstance(value, bytes) for value in content.values()):
            return [["HSET", key, *_flat({name: value for name, value in content.items() if name not in _DENIALS})]]
        case dict() if content:
            return [["ZADD", key, *[part for member, score in content.items() for part in (score, member)]]]
        case list() if content and isinstance(content[0], tuple):
            return [_added(key, fields) for _, fields in content[:5]]
        case bytes():
            return [["SET", key, content, "PX", 600_000]]
    return []
