"""Replay, purge and expiry of dead letters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import anyio

from ..queues.envelope import DEFAULT_PAYLOAD_LIMIT, is_task_id
from ..queues.errors import LargeValueLost, PayloadTooLarge, UnreadableEnvelope
from ..queues.inspection.views import queue_partitions
from ..queues.json_form import merged
from ..queues.junk import count_of, set_aside, split
from ..queues.keys import Namespace, Partition
from ..queues.runtime import RUNTIME
from ..queues.security.encryption import HEAD, arguments_field
from ..queues.security.secret_arguments import contains_mask, restore_masked
from ..queues.step_failures import drop_failures
from ..queues.transport.gateway import Gateway
from ..queues.transport.large_values import read_arguments
from ..queues.transport.pipelining import Argument
from ..queues.transport.scripts import load_script, pairs
from .letters import DeadLetter
from .policy import Reason

_LUA = Path(__file__).parent / "lua"
_REPLAY = load_script(_LUA / "replay.lua")
_DISCARD = load_script(_LUA / "discard.lua")


@dataclass(frozen=True, slots=True)
class Replay:
    """Options of a replay.

    Attributes:
        fresh: Start without the checkpoint.
        rerun_failed: Drop the recorded failures of steps, so that these steps are called again.
        args: JSON object that replaces the arguments. Asterisks in the place of a secret keep the stored one.
        merge: Change the arguments by `args` instead, a JSON merge patch (RFC 7396): its members are set in them, and
            null removes one.
        merged_limit: Most bytes of the arguments after an edit.
        check: Called with the letter and its new arguments, as JSON with the secrets; raises an error for those that
            its task does not take.
        rate: Largest number of replays per second.
    """

    fresh: bool = False
    rerun_failed: bool = False
    args: bytes | None = None
    merge: bool = False
    merged_limit: int = DEFAULT_PAYLOAD_LIMIT
    check: Callable[[DeadLetter, bytes], None] | None = field(default=None, repr=False)
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.rate is not None and self.rate <= 0:
            raise ValueError(f"rate must be more than 0 per second, got {self.rate}")


async def replay(gateway: Gateway, letter: DeadLetter, how: Replay) -> bool:
    """Put a dead letter back on its queue, counters at zero. Return False if it was replayed or purged before.

    Failures are dropped in an act before the replay: if this process dies in between, the letter stays without them.

    Raises:
        DecryptionError: New arguments must be encrypted, or have masked values, or step records must be read, and the
            key is missing.
        UnreadableEnvelope: New arguments are given for a task of a newer version.
        PayloadTooLarge: The arguments are too large after the edit.
    """
    partition = letter.partition
    if how.rerun_failed and not (how.fresh or letter.raw) and not await drop_failures(gateway, partition, letter.id):
        return False
    args = b"" if how.args is None else await _edited(gateway, letter, how.args, how)
    if letter.reason == Reason.BUDGET:
        await _begin_budgets_again(gateway, letter)
    keys = [
        partition.dead,
        partition.record(letter.id),
        partition.steps(letter.id),
        partition.log(letter.id),
        partition.ready,
        partition.inbox(letter.id),
        partition.timeline,
    ]
    given = (letter.entry, int(how.fresh), args)
    alone = 0
    while True:
        start = await _fresh_head(gateway, partition, letter.id) if how.fresh and not letter.raw else ()
        done = await gateway.run(_REPLAY, keys, [*given, alone, letter.id, *start])
        if done == -1:
            others = await queue_partitions(gateway, Namespace(partition.namespace), partition.queue)
            if any(await gateway.pipeline([("EXISTS", other.record(letter.id)) for other in others])):
                return False
            alone = 1
        elif done != -2:  # an edit came in between
            return bool(done)


async def _fresh_head(gateway: Gateway, partition: Partition, task_id: str) -> tuple[Argument, ...]:
    """Return the counters of a task, and the head of a hash chain that starts there; nothing without a key.

    Raises `KeyMissing` if the task has a chain, and this process no key.
    """
    cipher = gateway.encryptor.of(partition, task_id)
    events, entries, head = await gateway.command("HMGET", partition.record(task_id), "events", "entries", "head")
    if not cipher.encrypts:
        if head is not None:
            cipher.decrypt(HEAD, head)
        return ()
    from ..queues.security.hash_chain import ChainLinks, HashChain

    chain = HashChain(cipher, ChainLinks(), ())
    chain.begin_after(count_of(events))
    return (events or b"0", entries or b"0", chain.seal(chain.add(()), count_of(entries)))


async def _begin_budgets_again(gateway: Gateway, letter: DeadLetter) -> None:
    """Let the used-up budgets of a task and of its parents begin again, before it is replayed: else it would be buried
    at once. A named budget is of other tasks as well, and stays as it is.

    If this process dies before the replay, the letter stays, and the budgets are as new for a later one.
    """
    from ..queues.budgets.store import BudgetStore

    partition = letter.partition
    if not await gateway.command("XRANGE", partition.dead, letter.entry, letter.entry):  # it was replayed before
        return
    store = BudgetStore(gateway, Namespace(partition.namespace))
    inherited = () if letter.envelope is None else letter.envelope.budgets
    for ledger in dict.fromkeys([letter.id, *(use.ledger for use in inherited if not use.name)]):
        found = await store.load(ledger)
        if found is not None and found.used_up:
            await store.reset(ledger, by="replay")


async def _edited(gateway: Gateway, letter: DeadLetter, edited: bytes, how: Replay) -> bytes:
    """Return new arguments as they are stored: encrypted if the old ones were."""
    arguments = await edited_arguments(gateway, letter, edited, how)
    if letter.args is None or letter.raw or letter.envelope is None:
        return arguments
    kind = arguments_field(letter.envelope.task, letter.envelope.secrets)
    return gateway.encryptor.of(letter.partition, letter.id).encrypt(kind, arguments)


async def edited_arguments(gateway: Gateway, letter: DeadLetter, edited: bytes, how: Replay) -> bytes:
    """Return the arguments that a letter has after an edit, as JSON with the stored secrets.

    Nothing is merged into arguments that Redis has lost, or that are those of a message which is no task.

    Raises:
        Errors of `replay`, and of `Replay.check`.
    """
    arguments = await _with_edit(gateway, letter, edited, how)
    if len(arguments) > how.merged_limit:
        remedy = (
            f"start a copy with 'perdure task fork {letter.id} --edit NAME=VALUE', which keeps the recorded steps, "
            "then purge the dead letter"
        )
        what = f"the edited arguments of task {letter.id}"
        raise PayloadTooLarge(what, len(arguments), how.merged_limit, remedy=remedy)
    if how.check is not None:
        how.check(letter, arguments)
    return arguments


async def _with_edit(gateway: Gateway, letter: DeadLetter, edited: bytes, how: Replay) -> bytes:
    if letter.args is None or letter.raw:
        return merged(b"{}", edited) if how.merge else edited
    if letter.envelope is None:
        raise UnreadableEnvelope(
            f"could not edit the arguments of task {letter.id}: a newer version of Perdure enqueued it; upgrade, then "
            "replay, or replay it unchanged"
        )
    task, secrets = letter.envelope.task, letter.envelope.secrets
    read = partial(read_arguments, gateway, letter.partition, letter.id, task, secrets, letter.args)
    former = b"{}"
    if how.merge or not gateway.encryptor.active:
        with suppress(LargeValueLost):  # they are to be replaced
            former = await read()  # raises if they are encrypted: new arguments would be stored without encryption
    if how.merge:
        edited = merged(former, edited)
    if (shown := (*letter.secrets, *letter.masked)) and contains_mask(edited):
        former = await read()
        edited = restore_masked(edited, lambda: former, shown)
    return edited


async def replay_all(
    gateway: Gateway, letters: AsyncIterable[DeadLetter], how: Replay
) -> AsyncIterator[tuple[DeadLetter, bool]]:
    """Replay letters in turn, within the rate; yield each with whether it was replayed now."""
    started = RUNTIME.monotonic()
    done = 0
    async for letter in letters:
        if how.rate is not None:
            await anyio.sleep(max(0.0, started + done / how.rate - RUNTIME.monotonic()))
        yield letter, await replay(gateway, letter, how)
        done += 1


async def purge(gateway: Gateway, letter: DeadLetter) -> bool:
    """Delete a dead letter with its record, checkpoint and log. Return False if it was gone already."""
    return await _discard(gateway, letter.partition, letter.entry.encode(), letter.id)


async def purge_all(gateway: Gateway, letters: AsyncIterable[DeadLetter]) -> AsyncIterator[tuple[DeadLetter, bool]]:
    """Purge letters in turn; yield each with whether it was purged now."""
    async for letter in letters:
        yield letter, await purge(gateway, letter)


_PAGE: Final = 200


async def trim_letters(gateway: Gateway, partition: Partition, retention: float) -> int:
    """Delete dead letters past the retention, each with its record, checkpoint and log. Return their number.

    Another worker may have kept the record for longer: without its letter, it would be dead and could not be replayed.
    """
    seconds, _ = await gateway.command("TIME", node_of=partition.dead)
    oldest = int(seconds) * 1000 - round(retention * 1000)
    deleted = 0
    while oldest > 0:
        page = await gateway.command("XRANGE", partition.dead, "-", f"({oldest}-0", "COUNT", _PAGE)
        letters = [(entry, split([pairs(fields).get(b"id", b"")], is_task_id).good) for entry, fields in page]
        foreign = [entry for entry, task_id in letters if not task_id]
        deleted += await set_aside(gateway, partition, partition.dead, "stream", foreign)
        discards = (_discard(gateway, partition, entry, *task_id) for entry, task_id in letters if task_id)
        deleted += sum(await asyncio.gather(*discards))
        if len(page) < _PAGE:
            break
    return deleted


async def _discard(gateway: Gateway, partition: Partition, entry: bytes, task_id: str) -> bool:
    keys = [
        partition.dead,
        partition.record(task_id),
        partition.steps(task_id),
        partition.log(task_id),
        partition.inbox(task_id),
        partition.timeline,
    ]
    return bool(await gateway.run(_DISCARD, keys, [entry, task_id]))
