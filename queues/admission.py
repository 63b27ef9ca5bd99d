"""Admission of limited tasks: from the waiting lists of a partition to its ready stream, with tokens of their limits."""

from __future__ import annotations

from collections.abc import Sequence

from .keys import Namespace, Partition
from .transport.gateway import Gateway

TOKEN_FIELD = b"token"
"""Field of the message of an admitted task: the nonce of its token, see `token_member`."""


def token_member(partition: Partition, task_id: str, nonce: str) -> str:
    """Return the member of a holders' set for the token of a task: `QUEUE/PARTITION/TASK/NONCE`."""
    return f"{partition.queue}/{partition.index}/{task_id}/{nonce}"


async def admit_due(gateway: Gateway, partition: Partition, *, life: float) -> tuple[int, float | None]:
    """Admit the tasks of a partition whose turn it is and whose limits have room.

    Args:
        life: Seconds for which a token is held before the worker that starts the task confirms it.

    Returns:
        How many tasks were admitted, and the seconds until the next call makes sense, None if none waits.
    """
    raise NotImplementedError


async def admit_now(gateway: Gateway, namespace: Namespace, hints: Sequence[str], *, life: float) -> int:
    """Admit tasks that waited for tokens which were released. Return their number.

    Args:
        hints: Waiters that a release returned, `QUEUE/PARTITION/KEYID/RING`. Others are ignored.
        life: See `admit_due`.
    """
    raise NotImplementedError
