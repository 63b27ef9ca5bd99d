"""The outbox for Django: tasks that a transaction of Django enqueues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.db import close_old_connections, transaction
from django.db.models import F

from ...outbox import NewRow, Outbox, OutboxRow, Trouble

T = TypeVar("T")


class DjangoOutbox(Outbox):
    """The outbox of an app in a database of Django: `App("shop", outbox=DjangoOutbox())`.

    `task.enqueue_in_sync(None, ...)` writes in the current transaction of the database; in place of None, the alias of
    the same database may be given. INSTALLED_APPS has `perdure.integrations.django.PerdureConfig`.

    Args:
        using: alias of the database.
        options: see `Outbox`: relay, poll, batch, lease.
    """

    def __init__(self, using: str = "default", **options: Any) -> None:
        super().__init__(**options)
        self.using = using

    async def add(self, session: Any, row: NewRow) -> None:
        await sync_to_async(self.add_sync)(session, row)

    def add_sync(self, session: Any, row: NewRow) -> None:
        if session not in (None, self.using):
            raise TypeError(f"the outbox takes None or {self.using!r}, the alias of its database, got {session!r}")
        self._tasks().create(**row._asdict())
        if self.relays_here:
            transaction.on_commit(self.wake, using=self.using, robust=True)

    def claim(self, connection: Any, apps: Sequence[str], now: float, until: float, token: str) -> list[OutboxRow]:
        free = self._tasks().filter(claim_at__lte=now, app__in=apps)
        # Read before the transaction, which begins with a write: SQLite refuses one that began with a read.
        numbers = list(free.order_by("number").values_list("number", flat=True)[: self.batch])
        if not numbers:
            return []
        with transaction.atomic(using=self.using):
            free.filter(number__in=numbers).update(claim_at=until, claimed_by=token, tries=F("tries") + 1)
            found = self._tasks().filter(claimed_by=token).order_by("number")
            return [OutboxRow(row.number, row.task_id, row.queue, bytes(row.body), row.tries) for row in found]

    def finish(self, connection: Any, sent: Sequence[int], troubles: Sequence[Trouble], token: str, now: float) -> None:
        with transaction.atomic(using=self.using):
            if sent:
                self._tasks().filter(number__in=sent, claimed_by=token).delete()
            for trouble in troubles:
                at = None if trouble.again is None else now + trouble.again
                row = self._tasks().filter(number=trouble.number, claimed_by=token)
                row.update(claim_at=at, error=trouble.error or None, claimed_by=None)

    def on_thread(self, function: Callable[..., T], *args: Any) -> T:
        close_old_connections()
        try:
            return function(None, *args)
        finally:
            close_old_connections()

    def _tasks(self) -> Any:
        from .models import OutboxTask  # when the apps of Django are loaded

        return OutboxTask.objects.using(self.using)
