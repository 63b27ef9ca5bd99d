"""The outbox for SQLAlchemy: a table, and the statements of its relay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    bindparam,
    delete,
    event,
    insert,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from ...queues.errors import ConfigurationError
from ..outbox import NewRow, Outbox, OutboxRow, Trouble

T = TypeVar("T")

_WAKES: Final = "perdure_outbox"
"""Note of a session that wakes the relays when it has committed."""


class SqlOutbox(Outbox):
    """The outbox of an app in a database that SQLAlchemy knows: `App("shop", outbox=SqlOutbox(engine))`.

    Sessions and connections may be asynchronous or not, whatever the engine of the relay is.

    Attributes:
        table: the table of the rows, which belongs to `metadata`, so that migrations make it.

    Args:
        engine: the engine of the relay, asynchronous or not.
        metadata: the metadata that the table joins, such as `Base.metadata`; by default one of its own.
        table: name of the table.
        options: see `Outbox`: relay, poll, batch, lease.
    """

    def __init__(
        self,
        engine: Engine | AsyncEngine,
        *,
        metadata: MetaData | None = None,
        table: str = "perdure_outbox",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        given: object = engine
        if not isinstance(given, Engine | AsyncEngine):
            raise ConfigurationError(f"engine of an outbox must be an engine of SQLAlchemy, got {engine!r}")
        self._engine = engine
        number = BigInteger().with_variant(Integer(), "sqlite")  # where only INTEGER counts by itself
        self.table = Table(
            table,
            MetaData() if metadata is None else metadata,
            Column("number", number, primary_key=True, autoincrement=True),
            Column("task_id", String(128), nullable=False),
            Column("app", String(64), nullable=False),
            Column("queue", String(256), nullable=False),
            Column("body", LargeBinary, nullable=False),
            Column("claim_at", Float(53), nullable=True),
            Column("claimed_by", String(32), nullable=True),
            Column("tries", Integer, nullable=False),
            Column("error", Text, nullable=True),
            Index(f"ix_{table}_claim_at", "claim_at"),
            sqlite_autoincrement=True,  # else SQLite gives the number of a deleted row to another one
        )

    async def create_table(self) -> None:
        """Create the table if it is not there, where no migrations do."""
        await self.call(lambda connection: self.table.create(connection, checkfirst=True))

    async def add(self, session: Any, row: NewRow) -> None:
        if isinstance(session, AsyncSession | AsyncConnection | async_scoped_session):
            await session.execute(self._insert(row))
            self._wake_after(session)
        else:
            self.add_sync(session, row)

    def add_sync(self, session: Any, row: NewRow) -> None:
        if not isinstance(session, Session | Connection | scoped_session):
            raise TypeError(
                f"the outbox takes a session or a connection of SQLAlchemy, got {session!r}; one of its asynchronous "
                "ones needs await task.enqueue_in(...)"
            )
        session.execute(self._insert(row))
        self._wake_after(session)

    def _insert(self, row: NewRow) -> Any:
        return insert(self.table).values(**row._asdict(), claim_at=0.0, tries=0)

    def _wake_after(self, session: Any) -> None:
        """Wake the relays of this process when the transaction of a session has committed."""
        if isinstance(session, scoped_session | async_scoped_session):
            session = session()
        if isinstance(session, AsyncSession):
            session = session.sync_session
        if not isinstance(session, Session) or not self.relays_here or session.info.get(_WAKES) is self:
            return

        def committed(session: Session) -> None:
            session.info.pop(_WAKES, None)
            self.wake()

        session.info[_WAKES] = self
        event.listen(session, "after_commit", committed, once=True)

    def claim(self, connection: Any, apps: Sequence[str], now: float, until: float, token: str) -> list[OutboxRow]:
        table = self.table
        free = (table.c.claim_at <= now) & table.c.app.in_(apps)
        numbers = connection.scalars(
            select(table.c.number).where(free).order_by(table.c.number).limit(self.batch)
        ).all()
        if not numbers:
            return []
        connection.execute(
            update(table)
            .where(table.c.number.in_(numbers), free)
            .values(claim_at=until, claimed_by=token, tries=table.c.tries + 1)
        )
        columns = (table.c.number, table.c.task_id, table.c.queue, table.c.body, table.c.tries)
        found = connection.execute(select(*columns).where(table.c.claimed_by == token).order_by(table.c.number))
        return [OutboxRow(*row) for row in found]

    def finish(self, connection: Any, sent: Sequence[int], troubles: Sequence[Trouble], token: str, now: float) -> None:
        table = self.table
        if sent:
            mine = table.c.claimed_by == token  # another relay may have claimed them since
            connection.execute(delete(table).where(table.c.number.in_(sent), mine))
        if troubles:
            change = (
                update(table)
                .where(table.c.number == bindparam("row"), table.c.claimed_by == token)
                .values(claim_at=bindparam("at"), error=bindparam("problem"), claimed_by=None)
            )
            rows = [
                {
                    "row": trouble.number,
                    "at": None if trouble.again is None else now + trouble.again,
                    "problem": trouble.error or None,
                }
                for trouble in troubles
            ]
            connection.execute(change, rows)

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        if isinstance(self._engine, AsyncEngine):
            async with self._engine.begin() as connection:
                result: T = await connection.run_sync(function, *args)
                return result
        return await super().call(function, *args)

    def on_thread(self, function: Callable[..., T], *args: Any) -> T:
        if isinstance(self._engine, AsyncEngine):
            raise TypeError("an asynchronous engine has no thread of the outbox")
        with self._engine.begin() as connection:
            return function(connection, *args)
