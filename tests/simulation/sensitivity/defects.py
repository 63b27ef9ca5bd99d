"""Defects of the scripts, which a test or `sensitivity` puts in: earlier versions had some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

__all__ = ["DEFECTS", "replacement"]

DEFECTS: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "entries after a gap are stored": (
        ("return last < tonumber(number) and -1 - last", "return false"),
        ("if last < number - 1 then\n  return -1 - last\nend", ""),
    ),
    "an entry that is stored is applied again": (("if number <= last then\n    kind = 'stored'\n  end", ""),),
    "a fence without the delivery count": (
        (" and tostring(pending[4]) == ARGV[4]\nend\n\nlocal function settled", "\nend\n\nlocal function settled"),
        (
            " and tostring(pending[4]) == ARGV[4]) then\n  return 0\nend\nlocal asked",
            ") then\n  return 0\nend\nlocal asked",
        ),
    ),
    "a fence without the worker": (
        ("return pending and pending[2] == ARGV[2] and tostring", "return pending and tostring"),
    ),
    "a release lowers the delivery count": (
        ("'IDLE', ARGV[7], 'JUSTID'", "'IDLE', ARGV[7], 'RETRYCOUNT', ARGV[4] - 1, 'JUSTID'"),
    ),
    "a settled delivery is forgotten": (("return last[1] == fence_text() and last[2] == ARGV[2]", "return false"),),
    "leases are not restarted": (("if not last or math.abs(now - last) > lease / 2 then\n    start = '-'\n  end", ""),),
    "claims while leases are left to restart": (("if restarting then", "if false then"),),
    "a worker claims what it runs": (("if page[at][2] == worker and not unknown[entry] then", "if false then"),),
    "a worker claims what it runs by XAUTOCLAIM": (
        ("if not redis.call('XPENDING', KEYS[1], group, '-', '+', 1, worker)[1] then", "if true then"),
    ),
    "an answer replaces the one that a wait has": (
        ("if held then\n  return {'taken', early and 'early' or 'answer'}\nend", ""),
    ),
    "an early answer is not given to its wait": (("local kept = early == '1' and", "local kept = false and"),),
    "a child that is known is enqueued again": (
        (
            "if redis.call('EXISTS', KEYS[3]) == 1 then\n  return 0\nend\nlocal tag",
            "local tag",
        ),
    ),
    "the end of a child is counted twice": (
        ("if not known[1] or redis.call('SISMEMBER', KEYS[3], ARGV[3]) == 0 then", "if not known[1] then"),
    ),
    "the end of a child lets no other one start": (
        ("if not failed and not known[6] and waiting > 0 then", "if false then"),
    ),
    "the end of a child does not wake its parent": (("if (over and word == plain) or", "if false and"),),
    "a delivered notice leaves the record for ever": (
        ("  redis.call('PEXPIRE', KEYS[1], string.format('%.0f', kept))\nend\nreturn 1", "end\nreturn 1"),
    ),
    "a closed join is left": (("  redis.call('UNLINK', KEYS[1], KEYS[2])\nelse", "else"),),
    "a keyed item is stored again": (("if not redis.call('ZSCORE', KEYS[i], digest) then", "if true then"),),
    "a mark is not stored": (("add_item(name, 10000, 'u', unit, 'y', try, 'cut', '1')", ""),),
    "the note of what was emitted is not stored": (("redis.call('HSET', KEYS[3], 'e:' .. step, value)", ""),),
    "the numbers of items have gaps": (("stream.at, stream.last + 1", "stream.at, stream.last + 2"),),
    "the names of streams are not kept": (("redis.call('HSET', KEYS[2], 'streams', names)", ""),),
    "streams outlive their task": (("redis.call('PEXPIRE', key, ttl)\n  end", "end"),),
    "a fresh replay voids no item": (("'cut', 'all'", "'cut', '0'"),),
    "a limit lets one more start": (("is_full(name, '-', limit.total)", "is_full(name, '-', limit.total + 1)"),),
    "the number of a key is not counted": (("if limit.running and key ~= '-'", "if false and key ~= '-'"),),
    "a start is not charged": (("rate.due = rate.due + rate.interval", ""),),
    "a rate lets too many start": (
        ("- rate.burst * rate.interval - PRECISE", "- 2 * rate.burst * rate.interval - PRECISE"),
    ),
    "tokens expire when the clock is set": (("math.min(passed, least)", "passed"),),
    "a token is not released": (("if redis.call('ZREM', holders(name, '-'), entry) == 1 then", "if false then"),),
    "a release leaves the token of the key": (("redis.call('ZREM', holders(name, key), member)", ""),),
    "a task that wakes goes to the end of its ordered list": (("== 'o' and place or 0}", "== 'o' and 0 or 0}"),),
    "an admitted task leaves its ordered list": (("if string.sub(task.key_id, 1, 1) ~= 'o' then", "if true then"),),
    "tokens are not renewed": (
        ("redis.call('ZADD', holders(name, '-'), 'XX', 'GT'", "redis.call('ZCARD', holders(name, '-')) -- "),
    ),
}
"""Defects, each as parts of scripts and what they are instead: of earlier versions, and of newer scripts."""


def replacement(*parts: tuple[str, str]) -> Callable[[bytes], bytes]:
    """Return a change of scripts that replaces parts of them."""

    def alter(source: bytes) -> bytes:
        for old, new in parts:
            source = source.replace(old.encode(), new.encode())
        return source

    return alter
