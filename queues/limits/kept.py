"""Tokens that parked tasks keep: a limit with `while_parked=True`. The worker that promotes a partition renews them.

The record of a parked task names its token, and the set `kept` of its partition has the time of the next renewal. After
its wait the task goes to the ready stream with the token. If no worker renews it, it expires; that of a task which is
not parked any more is released.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import orjson

from ..envelope import LimitUse
from ..keys import Namespace, Partition
from ..transport.gateway import Gateway
from ..transport.pipelining import Argument
from ..transport.scripts import queue_script
from .store import LimitStore, Released, ReleaseRequest, token_member

KEPT: Final = "p"
"""Flag of the use of a limit whose token a parked task keeps."""

_LOOK: Final = queue_script("look_kept")
_NOTE: Final = queue_script("note_kept")

_BATCH: Final = 200


def kept_text(nonce: str, uses: Sequence[LimitUse]) -> str:
    """Return how the record of a parked task names its token; empty if the task keeps none."""
    kept = [[use.name, use.key, use.cost] for use in uses if KEPT in use.flags]
    return f"{nonce} {orjson.dumps(kept).decode()}" if kept else ""


async def renew_kept(gateway: Gateway, partition: Partition, life: float) -> tuple[float, Released]:
    """Renew the tokens of parked tasks that are due, and release those of tasks that are not parked any more.

    If the process dies before it has noted that, the next worker does the same: each act is idempotent.

    Args:
        life: Seconds for which a token is held without a renewal.

    Returns:
        Seconds until the next call, and what was released.
    """
    found = await gateway.run(_LOOK, [partition.kept], [_BATCH])
    if not found:
        return life / 3, Released([], [], [])
    store = LimitStore(gateway, Namespace(partition.namespace), life)
    tokens = [_token(partition, task_id, text) for task_id, text, _ in found]
    parked = [position for position, (_, _, keeps) in enumerate(found) if keeps]
    gone = await store.renew([tokens[position] for position in parked])
    renewed = set(parked) - {parked[position] for position in gone}
    ended = [ReleaseRequest(*token) for token, (_, _, keeps) in zip(tokens, found, strict=True) if not keeps]
    released = await store.release(ended)
    args: list[Argument] = [round(life * 1000 / 3)]
    for position, (task_id, text, _) in enumerate(found):
        args += (task_id, text, "1" if position in renewed else "")
    left = await gateway.run(_NOTE, [partition.kept], args)
    return (0.0 if len(found) == _BATCH and left else life / 3), released


def _token(partition: Partition, task_id: bytes, text: bytes) -> tuple[str, list[LimitUse]]:
    """Return name and uses of a token; without uses if another program wrote the text."""
    nonce, _, data = text.partition(b" ")
    member = token_member(partition, task_id.decode("utf-8", "replace"), nonce.decode("utf-8", "replace"))
    try:
        return member, [LimitUse(str(name), str(key), int(cost)) for name, key, cost in orjson.loads(data)]
    except (ValueError, TypeError):
        return member, []
