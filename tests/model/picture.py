"""A snapshot of all keys of a namespace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from perdure.queues import Gateway, Namespace
from perdure.queues.transport.scripts import pairs

__all__ = ["Copy", "Group", "Picture", "Seen", "put_back", "take_copy", "take_picture"]

_LOOK = """
local time = redis.call('TIME')
local found = {time[1] * 1000 + math.floor(time[2] / 1000)}
for i = 1, #ARGV do
  for _, key in ipairs(redis.call('KEYS', ARGV[i])) do
    local kind, content = redis.call('TYPE', key)['ok'], nil
    if kind == 'hash' then
      content = redis.call('HGETALL', key)
    elseif kind == 'zset' then
      content = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
    elseif kind == 'stream' then
      local groups = {}
      for at, group in ipairs(redis.call('XINFO', 'GROUPS', key)) do
        groups[at] = {group, redis.call('XPENDING', key, group[2], '-', '+', 10000),
          redis.call('XINFO', 'CONSUMERS', key, group[2])}
      end
      content = {redis.call('XRANGE', key, '-', '+'), groups}
    else
      content = redis.call('GET', key)
    end
    found[#found + 1] = {key, kind, redis.call('PTTL', key), content}
  end
end
return found
"""

_COPY = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local found = {}
for i = 1, #ARGV do
  for _, key in ipairs(redis.call('KEYS', ARGV[i])) do
    local left = redis.call('PTTL', key)
    found[#found + 1] = {key, left < 0 and 0 or now + left, redis.call('DUMP', key)}
  end
end
return found
"""

_PUT_BACK = """
for i = 1, 2 do
  for _, key in ipairs(redis.call('KEYS', ARGV[i])) do
    redis.call('DEL', key)
  end
end
for i = 3, #ARGV, 3 do
  redis.call('RESTORE', ARGV[i], ARGV[i + 1], ARGV[i + 2], 'ABSTTL')
end
"""

Copy = list[tuple[bytes, int, bytes]]
"""Each key of a namespace, when it expires (milliseconds; 0: never), and its content."""


@dataclass(frozen=True)
class Group:
    """A consumer group. pending: by entry, its consumer, its delivery count, and its last delivery (milliseconds)."""

    delivered: bytes
    pending: dict[bytes, tuple[bytes, int, int]]
    names: set[str]


@dataclass(frozen=True)
class Seen:
    """One key. deadline: when it expires, in milliseconds; None for never."""

    kind: str
    deadline: int | None
    content: Any
    group: Group | None = None


@dataclass(frozen=True)
class Picture:
    """Every key of a namespace, at a time in milliseconds of Redis' clock."""

    at: int
    keys: dict[str, Seen]


async def take_picture(gateway: Gateway, namespace: Namespace) -> Picture:
    """Read all keys in one script, so that no other command runs in between."""
    at, *found = await gateway.command("EVAL", _LOOK, 0, *_patterns(namespace))
    return Picture(at, {key.decode(): _seen(at, kind.decode(), ttl, content) for key, kind, ttl, content in found})


async def take_copy(gateway: Gateway, namespace: Namespace) -> Copy:
    """Copy all keys in one script."""
    return [(key, at, content) for key, at, content in await gateway.command("EVAL", _COPY, 0, *_patterns(namespace))]


async def put_back(gateway: Gateway, namespace: Namespace, copy: Copy) -> None:
    """Replace all keys by those of a copy, in one script."""
    flat = [part for one in copy for part in one]
    await gateway.command("EVAL", _PUT_BACK, 0, *_patterns(namespace), *flat)


def _patterns(namespace: Namespace) -> tuple[str, str]:
    return f"{{{namespace.name}:*", f"{{{namespace.name}}}:*"


def _seen(at: int, kind: str, ttl: int, content: Any) -> Seen:
    deadline = None if ttl < 0 else at + ttl
    if kind == "stream":
        entries, groups = content
        return Seen(kind, deadline, entries, _group(at, *groups[0]) if groups else None)
    return Seen(kind, deadline, content if kind == "string" else pairs(content))


def _group(at: int, info: list[Any], pending: list[Any], consumers: list[Any]) -> Group:
    reported = pairs(info)
    held = {entry: (owner, count, at - idle) for entry, owner, idle, count in pending}
    return Group(reported[b"last-delivered-id"], held, {pairs(one)[b"name"].decode() for one in consumers})
