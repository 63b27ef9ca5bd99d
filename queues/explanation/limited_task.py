"""Reason why a task waits in the waiting list of its limits, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..envelope import NO_KEY, LimitUse, readable_envelope
from ..keys import Namespace, Partition, gate_of
from ..limit_views import status_of
from ..limits.store import LimitStore, LimitView
from ..transport.gateway import Gateway
from ..wording import listed


class LimitedTask(NamedTuple):
    """A task in a waiting list.

    Attributes:
        names: Names of its limits.
        before: Number of tasks before it in its list.
        full: What keeps it from starting now, for each limit that does: `openai: 2 of 2 running for tenant t1`.
        look: Milliseconds of Redis' clock at which its list is looked at next; None if it has no turn.
    """

    names: Sequence[str]
    before: int
    full: Sequence[str]
    look: int | None

    @property
    def text(self) -> str:
        """Text that says what it waits for."""
        names = listed(self.names, len(self.names))
        what = f"limit {'; limit '.join(self.full)}" if self.full else f"its turn at limit {names}"
        return what + (f", {self.before:,} before it" if self.before else "")


async def read_limited_task(gateway: Gateway, partition: Partition, task_id: str) -> LimitedTask | None:
    """Return what a task in a waiting list waits for; None if it is in none any more, or cannot be read."""
    envelope = readable_envelope(await gateway.command("HGET", partition.record(task_id), "env"))
    if envelope is None or not envelope.limits:
        return None
    uses, namespace = envelope.limits, Namespace(partition.namespace)
    gate = gate_of(uses)
    rank, score, full = await gateway.pipeline(
        [
            ("ZRANK", partition.limited(gate.key_id), task_id),
            ("ZSCORE", partition.turns(gate.ring), gate.key_id),
            ("ZSCORE", partition.turns(gate.ring), "~"),
        ]
    )
    store = LimitStore(gateway, namespace)
    views = await store.read([use.name for use in uses], most=1)
    keyed = [use for use in uses if use.key != NO_KEY]
    labels = await store.labels([(use.name, use.key) for use in keyed])
    counts = await gateway.pipeline([("ZCARD", namespace.limits.holders(use.name, use.key)) for use in keyed])
    running = {(use.name, use.key): count for use, count in zip(keyed, counts, strict=True)}
    reasons = [_reason(use, view, running, labels) for use, view in zip(uses, views, strict=True)]
    look = None if score is None else int(max(float(score), float(full or 0)))
    return LimitedTask([use.name for use in uses], rank or 0, [reason for reason in reasons if reason], look)


def _reason(
    use: LimitUse,
    view: LimitView,
    running: Mapping[tuple[str, str], int],
    labels: Mapping[tuple[str, str], str],
) -> str:
    """Return what of a limit keeps a task from starting; empty for nothing that is known."""
    status = status_of(view)
    if not view.defined:
        return f"{use.name}, which no worker has published"
    if status.state:
        return f"{use.name}: {status.state}"
    held = running.get((use.name, use.key), 0)
    if status.running is not None and use.key != NO_KEY and held >= status.running:
        what, key = status.by or "key", labels.get((use.name, use.key))
        return f"{use.name}: {held} of {status.running} running for {f'{what} {key}' if key else f'its {what}'}"
    if status.total is not None and view.held >= status.total:
        return f"{use.name}: {view.held} of {status.total} running"
    return ""
