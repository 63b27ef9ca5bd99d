"""The outbox for SQLAlchemy: commit, roll-back, options, and what becomes of rows that cannot be sent."""

from __future__ import annotations

from typing import Any

import pytest
from anyio import to_thread
from perdure import App, Context, Middleware, Unique
from perdure.integrations.sqlalchemy import SqlOutbox
from perdure.queues.errors import ConfigurationError
from perdure.testing import PerdureFixture
from sqlalchemy import MetaData, create_engine, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from tests.adapters.sqlalchemy.shop import Order, lines, make_app, open_async_engine, open_engine
from tests.adapters.sqlalchemy.waiting import until


def outbox_of(app: App) -> SqlOutbox:
    outbox = app.outbox
    assert isinstance(outbox, SqlOutbox)
    return outbox


def rows(app: App, url: str) -> list[Any]:
    """Return the rows of the outbox."""
    with open_engine(url).connect() as connection:
        return list(connection.execute(select(outbox_of(app).table)))


async def sent(app: App, url: str) -> None:
    await until(lambda: not rows(app, url), "the outbox is empty")


@pytest.mark.parametrize("asynchronous", [False, True], ids=["engine", "async engine"])
async def test_committed_tasks_run_once_and_others_never(
    perdure: PerdureFixture, database: str, asynchronous: bool
) -> None:
    app = make_app(database, asynchronous=asynchronous)
    engine = open_async_engine(database)
    async with app, perdure.run_worker(app):
        async with AsyncSession(engine) as session:
            session.add(Order(id=1))
            task_id = await app.tasks["invoice"].enqueue_in(session, 1)
            await session.commit()
        async with AsyncSession(engine) as session:
            session.add(Order(id=2))
            await app.tasks["invoice"].enqueue_in(session, 2)
            await session.rollback()

        def order() -> None:
            with Session(open_engine(database)) as session:
                session.add(Order(id=3))
                app.tasks["invoice"].enqueue_in_sync(session, 3)
                session.commit()

        await to_thread.run_sync(order)
        await sent(app, database)
        handle = await app.producer.find(task_id)
        assert handle is not None
        assert await handle.result(timeout=20) == 100
        await until(lambda: len(lines()) == 2, "both tasks have run")
    assert sorted(lines()) == ["invoice 1", "invoice 3"]
    with open_engine(database).connect() as connection:
        assert sorted(connection.scalars(select(Order.id))) == [1, 3]


async def test_a_transaction_needs_no_redis(
    database: str, monkeypatch: pytest.MonkeyPatch, perdure: PerdureFixture
) -> None:
    app = make_app(database)
    with Session(open_engine(database)) as session:
        task_id = app.tasks["invoice"].enqueue_in_sync(session, 1)  # the app is not open
        session.commit()
    [row] = rows(app, database)
    assert (row.task_id, row.app, row.queue, row.tries) == (task_id, "shop", "shop", 0)


async def test_options_of_the_call_hold(perdure: PerdureFixture, database: str) -> None:
    app = make_app(database)
    invoice = app.tasks["invoice"]
    with Session(open_engine(database)) as session:
        invoice.options(delay=3600, tags=["later"], task_id="bill-1").enqueue_in_sync(session, 1)
        invoice.options(queue="other", key="k", max_attempts=1, priority="high").enqueue_in_sync(session, 2)
        session.commit()
    async with app:
        await sent(app, database)
        later = await app.producer.find("bill-1")
        assert later is not None
        assert await later.status() == "scheduled"
        due = await perdure.assert_enqueued(invoice, order=1)
        assert due.id == "bill-1"
        assert due.partition.queue == "shop"
        other = await perdure.assert_enqueued(invoice.options(queue="other").task, order=2)
        assert other.partition.queue == "other"


async def test_a_row_that_conflicts_keeps_its_error_and_holds_up_no_other(
    perdure: PerdureFixture, database: str
) -> None:
    app = make_app(database)
    invoice = app.tasks["invoice"]
    async with app, perdure.run_worker(app):
        await invoice.options(task_id="bill-7").enqueue(7)
        with Session(open_engine(database)) as session:
            invoice.options(task_id="bill-7").enqueue_in_sync(session, 8)
            invoice.options(task_id="bill-9").enqueue_in_sync(session, 9)
            invoice.options(task_id="bill-9").enqueue_in_sync(session, 9)  # again, with the same arguments
            session.commit()
        await until(lambda: len(rows(app, database)) == 1, "the other rows are sent")
        await until(lambda: rows(app, database)[0].error is not None, "the row has its error")
        await until(lambda: len(lines()) == 2, "both tasks have run")
    [row] = rows(app, database)
    assert row.claim_at is None
    assert "bill-7 exists already" in row.error
    assert sorted(lines()) == ["invoice 7", "invoice 9"]


async def test_a_row_waits_while_its_queue_is_full(perdure: PerdureFixture, database: str) -> None:
    app = make_app(database)
    invoice = app.tasks["invoice"]
    async with app:
        await invoice.enqueue(1)
        with Session(open_engine(database)) as session:
            invoice.options(max_depth=1).enqueue_in_sync(session, 2)
            session.commit()
        await until(lambda: rows(app, database)[0].error is not None, "the row was refused")
        async with perdure.run_worker(app):
            await sent(app, database)
            await until(lambda: len(lines()) == 2, "both tasks have run")


async def test_unique_tasks(perdure: PerdureFixture, database: str) -> None:
    app = make_app(database)
    remind = app.tasks["remind"]
    with Session(open_engine(database)) as session:
        for text in ("first", "second"):
            remind.enqueue_in_sync(session, 1, text)
        with pytest.raises(ValueError, match="unique with a function"):
            remind.options(unique=Unique("while_queued", by=lambda args: args["order"])).enqueue_in_sync(session, 1, "")
        session.commit()
    async with app:
        await sent(app, database)
        async with perdure.run_worker(app):
            await until(lambda: len(lines()) == 1, "the last one has run")
    assert lines() == ["remind 1 second"]


async def test_a_transaction_in_a_step_that_runs_again_enqueues_one_task(
    perdure: PerdureFixture, database: str
) -> None:
    app = make_app(database)
    invoice = app.tasks["invoice"]

    @app.task
    async def close(ctx: Context) -> list[str]:
        def bill() -> str:
            with Session(open_engine(database)) as session:
                task_id = invoice.enqueue_in_sync(session, 5)
                session.commit()
            return task_id

        first = await ctx.step("bill", bill)
        async with AsyncSession(engine) as session:  # outside of a step, a run that repeats the call has the same id
            second = await invoice.enqueue_in(session, 6)
            await session.commit()
        await ctx.sleep(0.05)  # parks the task, which then begins at the top again
        return [first, second]

    engine = open_async_engine(database)
    async with app, perdure.run_worker(app):
        first, second = await (await close.enqueue()).result(timeout=20)
        await sent(app, database)
        await until(lambda: len(lines()) == 2, "both tasks have run")
    assert first != second
    assert sorted(lines()) == ["invoice 5", "invoice 6"]


async def test_hooks_of_enqueue_run(perdure: PerdureFixture, database: str) -> None:
    class Tenant(Middleware):
        async def enqueue(self, call: Any, call_next: Any) -> Any:
            call.headers["tenant"] = "acme"
            return await call_next()

    outbox = make_app(database).outbox
    app = App("shop", outbox=outbox, middleware=[Tenant()])

    @app.task
    async def invoice(ctx: Context, order: int) -> str:
        return ctx.headers["tenant"]

    with Session(open_engine(database)) as session:
        task_id = invoice.enqueue_in_sync(session, 1)
        session.commit()
    async with app, perdure.run_worker(app):
        await sent(app, database)
        handle = await app.producer.find(task_id)
        assert handle is not None
        assert await handle.result(timeout=20) == "acme"


def test_a_late_relay_deletes_no_row_of_another_claim(database: str) -> None:
    """Not even one that has the number of a row which the relay has sent, as SQLite would give it."""
    app = make_app(database)
    outbox, invoice = outbox_of(app), app.tasks["invoice"]

    def write() -> None:
        with Session(open_engine(database)) as session:
            invoice.enqueue_in_sync(session, 1)
            session.commit()

    write()
    with open_engine(database).begin() as connection:
        [late] = outbox.claim(connection, ["shop"], 1.0, 2.0, "late")
    with open_engine(database).begin() as connection:
        [other] = outbox.claim(connection, ["shop"], 3.0, 4.0, "other")
        outbox.finish(connection, [late.number], [], "late", 3.0)
        assert connection.execute(select(outbox.table.c.claimed_by)).scalars().all() == ["other"]
        outbox.finish(connection, [other.number], [], "other", 3.0)
    write()
    with open_engine(database).begin() as connection:
        outbox.finish(connection, [late.number], [], "late", 5.0)
    [row] = rows(app, database)
    assert row.number > late.number


def test_the_table_joins_the_metadata_of_the_project() -> None:
    metadata = MetaData()
    SqlOutbox(create_engine("sqlite://"), metadata=metadata, table="tasks_to_send")
    assert list(metadata.tables) == ["tasks_to_send"]


def test_misuse_is_named(database: str) -> None:
    app = make_app(database)
    with pytest.raises(TypeError, match="the outbox takes a session or a connection of SQLAlchemy, got 'session'"):
        app.tasks["invoice"].enqueue_in_sync("session", 1)
    with pytest.raises(ConfigurationError, match="must be an engine of SQLAlchemy"):
        SqlOutbox("sqlite://")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="lease of an outbox must be more than 0, got 0"):
        SqlOutbox(create_engine("sqlite://"), lease=0)
    other = App("other")

    @other.task
    async def job(ctx: Context) -> None:
        pass

    with pytest.raises(ConfigurationError, match="app 'other' has no outbox"):
        job.enqueue_in_sync(None)
    with pytest.raises(ConfigurationError, match="outbox of an app must be"):
        App("other", outbox="sqlite://")  # type: ignore[arg-type]
