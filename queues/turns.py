"""Work that one worker does for all of them, once in a while: whoever comes first takes the turn.

A turn saves work and protects nothing: what is done in it may as well be done by two. So it is never given back, and
the worker that took it may die; the next turn comes with its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from .errors import ServerFull
from .gateway import Gateway

__all__ = ["take_turns"]

T = TypeVar("T")


async def take_turns(gateway: Gateway, turns: Mapping[T, str], worker: str, seconds: float) -> list[T]:
    """Those turns that nobody has taken in the last `seconds`; this worker's now. turns: each with its key.

    One round trip. Where a reply is lost and the command asked again, nobody has the turn until its time is over. On a
    full server nobody can take a turn, so everybody has all of them.
    """
    asked = [("SET", key, worker, "NX", "PX", max(1, round(seconds * 1000))) for key in turns.values()]
    try:
        taken = await gateway.pipeline(asked)
    except ServerFull:
        return list(turns)
    return [turn for turn, reply in zip(turns, taken, strict=True) if reply is not None]
