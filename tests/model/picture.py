"""A snapshot of all keys of a namespace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from perdure.queues import Gateway, Namespace, pairs

__all__ = ["Group", "Picture", "Seen", "take_picture"]

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
    patterns = (f"{{{namespace.name}:*", f"{{{namespace.name}}}:*")
    at, *found = await gateway.command("EVAL", _LOOK, 0, *patterns)
    return Picture(at, {key.decode(): _seen(at, kind.decode(), ttl, content) for key, kind, ttl, content in found})


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
