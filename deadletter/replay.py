"""The way back: replaying dead letters, and purging those nobody wants back."""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import anyio

from ..queues import Gateway, arguments_field, is_encrypted, load_script, restore_masked
from .letters import DeadLetter

__all__ = ["Replay", "purge", "purge_all", "replay", "replay_all"]

_LUA = Path(__file__).parent / "lua"
_REPLAY = load_script(_LUA / "replay.lua")
_DISCARD = load_script(_LUA / "discard.lua")


@dataclass(frozen=True, slots=True)
class Replay:
    """How to replay. fresh: without the checkpoint, from the first step. args: a JSON object that replaces the
    arguments, in which asterisks in the place of a secret stand for the former one. rate: at most so many per second.
    """

    fresh: bool = False
    args: bytes | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.rate is not None and self.rate <= 0:
            raise ValueError(f"the rate must be more than 0 per second, not {self.rate}")


async def replay(gateway: Gateway, letter: DeadLetter, how: Replay) -> bool:
    """Put one dead letter back on its queue, counters at zero. False where another replayed or purged it first.

    Raises `DecryptionError` if new arguments must be encrypted or hold masked values, and the key is missing.
    """
    partition = letter.partition
    args = b"" if how.args is None else _edited(gateway, letter, how.args)
    keys = [
        partition.dead,
        partition.record(letter.id),
        partition.steps(letter.id),
        partition.log(letter.id),
        partition.ready,
    ]
    return bool(await gateway.run(_REPLAY, keys, [letter.entry, int(how.fresh), args]))


def _edited(gateway: Gateway, letter: DeadLetter, edited: bytes) -> bytes:
    """New arguments as they are stored: with what was hidden in its place again, and sealed as the former ones were."""
    if letter.envelope is None or letter.args is None:
        return edited
    kind = arguments_field(letter.envelope.task)
    seal = gateway.encryptor.of(letter.partition, letter.id)
    if is_encrypted(letter.args) and not gateway.encryptor.active:
        seal.decrypt(kind, letter.args)  # raises: they were sealed, and new ones would lie open
    if letter.secrets:
        edited = restore_masked(edited, lambda: seal.decrypt(kind, letter.args or b"{}", plain=True), letter.secrets)
    return seal.encrypt(kind, edited)


async def replay_all(
    gateway: Gateway, letters: AsyncIterable[DeadLetter], how: Replay
) -> AsyncIterator[tuple[DeadLetter, bool]]:
    """Replay letters one after another, no faster than the rate; yields each with whether it was replayed now."""
    began = time.monotonic()
    done = 0
    async for letter in letters:
        if how.rate is not None:
            await anyio.sleep(max(0.0, began + done / how.rate - time.monotonic()))
        yield letter, await replay(gateway, letter, how)
        done += 1


async def purge(gateway: Gateway, letter: DeadLetter) -> bool:
    """Delete one dead letter with its record, checkpoint and log. False where it was gone already."""
    partition = letter.partition
    keys = [partition.dead, partition.record(letter.id), partition.steps(letter.id), partition.log(letter.id)]
    return bool(await gateway.run(_DISCARD, keys, [letter.entry]))


async def purge_all(gateway: Gateway, letters: AsyncIterable[DeadLetter]) -> AsyncIterator[tuple[DeadLetter, bool]]:
    """Purge letters one after another; yields each with whether it was purged now."""
    async for letter in letters:
        yield letter, await purge(gateway, letter)
