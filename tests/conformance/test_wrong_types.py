"""Keys of another type: the gateway moves the value away, and each script then does what it does on a missing key."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from perdure.queues import Gateway, Namespace, Partition, QueueError
from perdure.queues.errors import WrongType
from perdure.queues.junk import set_hash_aside
from perdure.queues.keys import JUNK_ENTRIES, JUNK_TTL_MS, junk_keys, stored_type
from perdure.queues.transport.pipelining import Argument
from perdure.queues.transport.scripts import Script, pairs

from tests.conformance.test_scripts import live
from tests.support.consumers import needs_server

FOREIGN = b"foreign"

PRESENT = {
    *((script, "record") for script in ("enqueue", "schedule", "enqueue_one", "enqueue_copy", "trim_timeline")),
    *((script, "closed") for script in ("enqueue", "schedule", "enqueue_one", "enqueue_copy", "enqueue_successor")),
    ("reset_task", "closed"),
    ("store_ended", "record"),
    ("store_ended", "closed"),
    ("fire_schedule", "record"),
    ("fire_schedule", "closed"),
    ("enqueue_limited", "record"),
    ("enqueue_limited", "closed"),
    ("enqueue_child", "record"),
    ("enqueue_child", "closed"),
}
"""Scripts that only ask whether a key exists, which a value of another type does."""


def other_command(key: str) -> tuple[str, ...]:
    """Return a command that stores a value of another type under a key."""
    return ("SET", key, "foreign") if stored_type(key) != "string" else ("SADD", key, "foreign")


async def clean(gateway: Gateway, *keys: str) -> None:
    for key in keys:
        kept = junk_keys(key)
        await gateway.command("DEL", key, kept.value, kept.entries)


# set_key_aside


async def test_a_value_of_another_type_is_moved_and_listed_and_an_older_one_makes_room(
    gateway: Gateway, partition: Partition, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = logging.getLogger("perdure.queues.transport.gateway")  # whatever a worker of another test has set above it
    monkeypatch.setattr(source, "handlers", [caplog.handler])
    monkeypatch.setattr(source, "propagate", False)
    caplog.set_level(logging.WARNING, source.name)
    kept = junk_keys(partition.due)
    await gateway.command("SET", partition.due, "older")
    assert await gateway.set_keys_aside([partition.due])
    await gateway.command("RPUSH", partition.due, "foreign")
    assert await gateway.set_keys_aside([partition.ready, partition.due])
    assert not await gateway.set_keys_aside([partition.due])
    assert await gateway.command("EXISTS", partition.due) == 0
    assert await gateway.command("LRANGE", kept.value, 0, -1) == [FOREIGN]
    assert 0 < await gateway.command("PTTL", kept.value) <= JUNK_TTL_MS
    entries = [pairs(fields) for _, fields in await gateway.command("XRANGE", kept.entries, "-", "+")]
    assert [(entry[b"key"], entry[b"item"]) for entry in entries] == [(partition.due.encode(), kept.value.encode())] * 2
    assert 0 < await gateway.command("PTTL", kept.entries) <= JUNK_TTL_MS
    warnings = [record.getMessage() for record in caplog.records if partition.due in record.getMessage()]
    assert ["type string instead of zset" in warnings[0], "type list instead of zset" in warnings[1]] == [True, True]
    assert all(kept.value in warning for warning in warnings)
    assert len(warnings) == 2
    await clean(gateway, partition.due)


async def test_a_value_of_the_right_type_stays(gateway: Gateway, partition: Partition) -> None:
    await gateway.command("ZADD", partition.due, 1, "x")
    await gateway.command("SET", partition.upload("x", "y"), "x", "PX", 60_000)
    await gateway.command("SET", partition.steps("x"), "x", "PX", 60_000)
    assert not await gateway.set_keys_aside([partition.due, partition.upload("x", "y"), partition.steps("x")])
    assert await gateway.command("ZSCORE", partition.due, "x") == b"1"
    await gateway.command("DEL", partition.due)


async def test_each_shared_key_has_a_type_so_that_another_value_is_moved(
    gateway: Gateway, namespace: Namespace, partition: Partition
) -> None:
    for owner in (partition, namespace.session_partitions[0], namespace):
        for key in owner.shared_keys:
            await gateway.command("DEL", key)
            await gateway.command(*other_command(key))
            assert await gateway.set_keys_aside([key]), key
            await clean(gateway, key)


async def test_a_hash_is_moved_if_it_is_what_the_caller_has_read(gateway: Gateway, partition: Partition) -> None:
    await gateway.command("HSET", partition.closed, "route", "x")
    assert not await set_hash_aside(gateway, partition.closed, "route", b"")
    assert await set_hash_aside(gateway, partition.closed, "route", b"x")
    assert not await set_hash_aside(gateway, partition.closed, "route", b"x")
    await gateway.command("HSET", partition.closed, "a", "b")
    assert await set_hash_aside(gateway, partition.closed, "route", b"")
    assert await gateway.command("HGETALL", junk_keys(partition.closed).value) == [b"a", b"b"]
    await clean(gateway, partition.closed)


async def test_the_list_of_junk_is_bounded_and_may_be_of_another_type(gateway: Gateway, partition: Partition) -> None:
    kept = junk_keys(partition.due)
    for _ in range(JUNK_ENTRIES + 5):
        await gateway.command("SET", partition.due, "foreign")
        await gateway.set_keys_aside([partition.due])
    assert await gateway.command("XLEN", kept.entries) == JUNK_ENTRIES
    await gateway.command("DEL", kept.entries)
    await gateway.command("SET", kept.entries, "foreign")
    await gateway.command("SET", partition.due, "foreign")
    assert await gateway.set_keys_aside([partition.due])
    assert await gateway.set_keys_aside([partition.junk])
    await clean(gateway, partition.due, partition.junk)


async def test_commands_of_a_listing_leave_a_value_and_those_of_a_worker_move_it(
    gateway: Gateway, partition: Partition
) -> None:
    await gateway.command("SET", partition.due, "foreign")
    with pytest.raises(WrongType, match="WRONGTYPE"):
        await gateway.command("ZCARD", partition.due)
    gateway.repairs = True
    try:
        assert await gateway.command("ZCARD", partition.due) == 0
        await gateway.command("SET", partition.due, "foreign")
        assert await gateway.pipeline([("ZCARD", partition.due), ("XLEN", partition.dead)]) == [0, 0]
    finally:
        gateway.repairs = False
    await clean(gateway, partition.due)


# all scripts


class Replacing(Gateway):
    """A gateway that tries each script on its keys, one of which is of another type, before it executes the script."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway.address)
        self.differences: list[str] = []
        self.tried: Counter[str] = Counter()

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument], derived: Any = None) -> Any:
        await self._try(script, keys, args)
        return await super().run(script, keys, args, derived)

    async def run_once(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        await self._try(script, keys, args)
        return await super().run_once(script, keys, args)

    async def _try(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> None:
        if script.name in ("set_key_aside", "set_aside") or self.tried[script.name] >= 2:
            return
        self.tried[script.name] += 1
        before = await self.pipeline([("DUMP", key) for key in keys], node_of=keys[0])
        ttls = await self.pipeline([("PTTL", key) for key in keys])
        for position, key in enumerate(keys):
            if stored_type(key) is None:
                continue
            await self.command("DEL", key)
            wanted = await self._executed(script, keys, args), await self._shape(keys, key)
            await self._restore(keys, before, ttls)
            await self.command("DEL", key)
            await self.command(*other_command(key))
            unchanged = await self._shape(keys, key)
            found = await self._executed(script, keys, args), await self._shape(keys, key)
            kind = key.partition("}:")[2].partition(":")[0]
            if found != wanted and (script.name, kind) not in PRESENT and found != ("WrongType", unchanged):
                shapes = found[1].items() ^ wanted[1].items()
                self.differences.append(f"{script.name}, key {position + 1} ({key}): {found[0]}, {wanted[0]}, {shapes}")
            await self._restore(keys, before, ttls)
            await clean(self, key)
            await self._restore(keys, before, ttls)

    async def _executed(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> str:
        found = ""
        for _ in range(2):  # a script that is executed once is repeated by its caller
            try:
                reply = await super().run(script, keys, args)
            except QueueError as error:
                found = type(error).__name__
            else:
                return "error" if reply is None else "reply"
        return found

    async def _shape(self, keys: Sequence[str], replaced: str) -> dict[str, tuple[object, ...]]:
        """Return what is stored, without times: type, whether there is a TTL, members, fields, number of entries."""
        found: dict[str, tuple[object, ...]] = {}
        for key in dict.fromkeys(keys):
            kind = (await self.command("TYPE", key)).decode()
            missing = kind == "none" or key.endswith(":nudge")  # a lost nudge delays a task by a second
            if missing or (key == replaced and kind != stored_type(key)):
                continue
            content: Any = None
            if kind == "hash":
                fields = await self.command("HKEYS", key)
                content = tuple(sorted(re.sub(rb"\d{13}", b"TIME", field) for field in fields))
            elif kind == "zset":
                content = tuple(sorted(await self.command("ZRANGE", key, 0, -1)))
            elif kind == "stream":
                content = await self.command("XLEN", key)
            found[key] = (kind, await self.command("PTTL", key) > 0, content)
        return found

    async def _restore(self, keys: Sequence[str], before: Sequence[bytes | None], ttls: Sequence[int]) -> None:
        for key, dump, ttl in zip(keys, before, ttls, strict=True):
            await self.command("DEL", key)
            if dump is not None:
                await self.command("RESTORE", key, max(ttl, 0), dump, node_of=key)


async def test_a_script_does_on_a_key_of_another_type_what_it_does_on_a_missing_one(
    gateway: Gateway, namespace: Namespace
) -> None:
    needs_server(gateway, "the fake has no DUMP of consumer groups")
    replacing = Replacing(gateway)
    await replacing.open()
    try:
        await live(replacing, namespace)
    finally:
        await replacing.close()
    assert len(replacing.tried) > 50
    assert "\n".join(replacing.differences) == ""
