"""Seeded mutations of the keys of a namespace, written with raw commands as another program would.

Mutation N of a seed is the same in every run: its place, its act and its choices come from `Random(f"{seed}:{N}")`.
Which keys of a kind exist is read when it is applied.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis.asyncio
from redis.exceptions import ResponseError

from tests.fuzz.places import Place, Type

Command = list[bytes | str | int]

__all__ = ["ACTS", "BYTES", "Mutation", "Mutator", "draw"]

BYTES: Final[Mapping[str, bytes]] = {
    "empty": b"",
    "not UTF-8": b"\xff",
    "cut UTF-8": "ü".encode()[:1],
    "NUL": b"\x00",
    "100 kB": b"a" * 100_000,
    "unicode": "ä\u202e\U0001f4a9\u2028".encode(),
    "braces": b"{perdure:x:0}:ready",
    "newline": b"a\r\nb",
    "control": b"\x1b[2J\x07",
    "blanks": b" 1 2  3 ",
    "path": b"../../x",
    "script name": b"__proto__",
    "large number": b"9223372036854775808",
    "5,000 digits": b"9" * 5000,
    "number": b"7",
    "nan": b"nan",
    "inf": b"inf",
    "-inf": b"-inf",
    "negative": b"-1",
    "fraction": b"1.5",
    "1e400": b"1e400",
    "null": b"null",
    "list": b"[1]",
    "object": b'{"a":{"b":[]}}',
    "object of 1e400": b'{"id":1e400,"v":1e400}',
    "text": b'"text"',
    "surrogate": b'"\\ud800"',
    "deep": b"[" * 5000,
    "link": b'#{"digest":"x","size":-1,"chunks":1e12}',
    "cipher mark": b"\xc1\x01\x00\xff",
    "entry id": b"18446744073709551615-18446744073709551615",
    "task id": b"0199aaaa-0000-7000-8000-000000000000",
    "digest": b"0000" + b"a" * 28,
}
"""A value of each class."""

_JSON: Final[Sequence[Any]] = (None, True, -1, 2**63, 1e300, "", "text", "\udcff", [], [1], {}, {"a": {}}, "a" * 1000)
_NAMES: Final = [*(name for name in BYTES if name not in ("100 kB", "5,000 digits", "deep")), "digest", "task id"]
_SCORES: Final = ("0", "1", "-1", "5e12", "1e300", "inf", "-inf", "9007199254740993", "1.5", "now")
_LARGEST: Final = b"18446744073709551615-18446744073709551615"
_GROUP: Final = "workers"
_TYPES: Final[Sequence[Type | str]] = ("hash", "stream", "string", "zset", "set", "list")

ACTS: Final[Mapping[str, int]] = {
    "foreign": 8,
    "replace": 6,
    "cut": 3,
    "reshape": 3,
    "remove": 3,
    "type": 3,
    "delete": 1,
    "trim": 1,
    "largest": 1,
    "consumer": 1,
}
"""Kinds of mutations, with their weights. What makes no sense for a type is `foreign` there."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A mutation before it is applied: where, of which kind, and the seed of all further choices."""

    number: int
    place: Place
    act: str
    dice: str


def draw(seed: int, number: int, places: Sequence[Place]) -> Mutation:
    """Return mutation `number` of a seed."""
    dice = random.Random(f"{seed}:{number}")
    place = dice.choice(places)
    act = dice.choices(list(ACTS), list(ACTS.values()))[0]
    if act in ("trim", "largest", "consumer") and place.type != "stream":
        act = "foreign"
    return Mutation(number, place, act, f"{seed}:{number}:choices")


class Mutator:
    """Applies mutations to a namespace over a connection of its own."""

    def __init__(self, client: redis.asyncio.Redis, namespace: str) -> None:
        self._client: Any = client  # its types are of all its modes at once
        self._namespace = namespace

    async def keys(self) -> list[bytes]:
        """Return all keys of the namespace, sorted."""
        found: list[bytes] = []
        for pattern in (f"{{{self._namespace}:*", f"{{{self._namespace}}}:*"):
            found += [key async for key in self._client.scan_iter(pattern, count=1000)]
        return sorted(set(found))

    async def apply(self, mutation: Mutation) -> str:
        """Apply a mutation. Return the command, shortened."""
        dice = random.Random(mutation.dice)
        place = mutation.place
        existing = place.keys(await self.keys())
        key = (
            dice.choice(existing)
            if existing and (not place.named or dice.random() < 0.85)
            else _foreign_key(place, dice)
        )
        if mutation.act == "type":
            others = [kind for kind in _TYPES if kind != place.type]
            return await self._send(["DEL", key], _written(dice.choice(others), key, dice))
        if mutation.act == "delete":
            return await self._send(["DEL", key])
        made: Callable[[str, bytes, random.Random], Any] = getattr(self, f"_{place.type}")
        try:
            return await self._send(await made(mutation.act, key, dice))
        except ResponseError as error:
            if "WRONGTYPE" in str(error):  # an earlier mutation has replaced the key
                return await self._send(["DEL", key], _written(place.type, key, dice))
            return await self._send(["DEL", key])  # such as an entry id that is smaller than the last one

    async def _send(self, *commands: Command) -> str:
        """Execute commands in one transaction: workers write to the keys at the same time."""
        async with self._client.pipeline(transaction=len(commands) > 1) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            await pipeline.execute()
        shown = [
            " ".join(repr(part)[:60] if isinstance(part, bytes) else str(part) for part in one) for one in commands
        ]
        return " + ".join(shown)[:300]

    async def _hash(self, act: str, key: bytes, dice: random.Random) -> Command:
        fields: list[bytes] = sorted(await self._client.hkeys(key))
        if not fields or act == "foreign":
            return ["HSET", key, _bytes(dice), _bytes(dice)]
        field = dice.choice(fields)
        if act == "remove":
            return ["HDEL", key, field]
        value = _changed(act, await self._client.hget(key, field) or b"", dice)
        if field == b"format" and value.isdigit():
            value = b"-1"  # a number is the format of a later version, which every process refuses on purpose
        return ["HSET", key, field, value]

    async def _zset(self, act: str, key: bytes, dice: random.Random) -> Command:
        members: list[bytes] = sorted(await self._client.zrange(key, 0, -1))
        if not members or act == "foreign":
            return ["ZADD", key, await self._score(dice), _bytes(dice)]
        member = dice.choice(members)
        if act == "remove":
            return ["ZREM", key, member]
        if act == "replace":
            return ["ZADD", key, await self._score(dice), member]
        return ["ZADD", key, await self._score(dice), _changed(act, member, dice)]

    async def _score(self, dice: random.Random) -> str:
        score = dice.choice(_SCORES)
        return str((await self._client.time())[0] * 1000) if score == "now" else score

    async def _string(self, act: str, key: bytes, dice: random.Random) -> Command:
        if act == "remove":
            return ["DEL", key]
        value = await self._client.get(key) or b""
        ttl: list[str | int] = ["PX", dice.choice((1, 100, 5000))] if dice.random() < 0.3 else []
        return ["SET", key, _changed(act, value, dice), *ttl]

    async def _stream(self, act: str, key: bytes, dice: random.Random) -> Command:
        if act == "trim":
            return ["XTRIM", key, "MAXLEN", dice.choice((0, 1, 5))]
        if act == "largest":
            return ["XADD", key, dice.choice((_LARGEST, b"9999999999999999-0")), _bytes(dice), _bytes(dice)]
        if act == "consumer":
            return await self._consumer(key, dice)
        entries = await self._client.execute_command("XRANGE", key, "-", "+", "COUNT", 100)
        if not entries or act == "foreign":
            return ["XADD", key, dice.choice((b"*", b"*", b"1-1")), _bytes(dice), _bytes(dice)]
        entry, fields = dice.choice(entries)
        if act == "remove":
            return ["XDEL", key, entry]
        flat = [part for pair in fields.items() for part in pair] if isinstance(fields, dict) else list(fields)
        at = dice.randrange(len(flat))
        flat[at] = _changed(act, flat[at], dice)
        return ["XADD", key, "*", *flat]

    async def _consumer(self, key: bytes, dice: random.Random) -> Command:
        """Return what an operator's script does to a group."""
        name = BYTES[dice.choice(_NAMES)]
        acts: list[Command] = [
            ["XGROUP", "CREATECONSUMER", key, _GROUP, name],
            ["XREADGROUP", "GROUP", _GROUP, name, "COUNT", 1, "STREAMS", key, ">"],
            ["XGROUP", "DESTROY", key, _GROUP],
            ["XGROUP", "SETID", key, _GROUP, dice.choice(("0", "$"))],
            ["XGROUP", "CREATE", key, name, "0", "MKSTREAM"],
        ]
        return dice.choice(acts)


def _foreign_key(place: Place, dice: random.Random) -> bytes:
    return place.key + BYTES[dice.choice(_NAMES)] if place.named else place.key


def _bytes(dice: random.Random) -> bytes:
    return dice.choice(list(BYTES.values()))


def _written(kind: str, key: bytes, dice: random.Random) -> Command:
    """Return the command that stores something of a type."""
    match kind:
        case "hash":
            return ["HSET", key, _bytes(dice), _bytes(dice)]
        case "stream":
            return ["XADD", key, "*", _bytes(dice), _bytes(dice)]
        case "zset":
            return ["ZADD", key, "1", _bytes(dice)]
        case "set":
            return ["SADD", key, _bytes(dice)]
        case "list":
            return ["LPUSH", key, _bytes(dice)]
        case _:
            return ["SET", key, _bytes(dice)]


def _changed(act: str, value: bytes, dice: random.Random) -> bytes:
    """Return a value that was cut, whose JSON has another shape, or another value."""
    if act == "cut" and value:
        at = dice.randrange(len(value))
        return value[:at] if dice.random() < 0.7 else value[at:]
    if act == "reshape":
        return _reshaped(value, dice)
    return _bytes(dice)


def _reshaped(value: bytes, dice: random.Random) -> bytes:
    try:
        data = json.loads(value)
    except (ValueError, RecursionError):
        at = dice.randrange(len(value) + 1)
        return value[:at] + bytes([dice.randrange(256)]) + value[at + 1 :]
    inner, names = (
        data,
        list(data) if isinstance(data, dict) else list(range(len(data))) if isinstance(data, list) else [],
    )
    if not names:
        return json.dumps(dice.choice(_JSON)).encode()
    name = dice.choice(names)
    if isinstance(inner[name], (dict, list)) and inner[name] and dice.random() < 0.6:
        inner[name] = json.loads(_reshaped(json.dumps(inner[name]).encode(), dice))
    elif isinstance(inner, dict) and dice.random() < 0.3:
        del inner[name]
    else:
        inner[name] = dice.choice(_JSON)
    return json.dumps(data).encode()
