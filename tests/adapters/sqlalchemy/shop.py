"""An app with an outbox for the tests, and for the worker processes that they kill and freeze.

Environment: SHOP_DATABASE is the URL of its database, SHOP_JOURNAL a file that gets a line for each run of a task,
SHOP_HOLD names the act of the relay at which it waits for as long as the file SHOP_JOURNAL.hold exists, SHOP_LEASE the
lease of the rows in seconds.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from perdure import App, Context, Unique
from perdure.integrations.sqlalchemy import SqlOutbox
from sqlalchemy import Engine, NullPool, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)


def note(line: str) -> None:
    """Append a line to the journal, in one write."""
    with Path(os.environ["SHOP_JOURNAL"]).open("a") as journal:
        journal.write(f"{line}\n")


def lines() -> list[str]:
    """Return the lines of the journal."""
    journal = Path(os.environ["SHOP_JOURNAL"])
    return journal.read_text().splitlines() if journal.exists() else []


def hold_file() -> Path:
    return Path(os.environ["SHOP_JOURNAL"]).with_suffix(".hold")


class HeldOutbox(SqlOutbox):
    """An outbox whose relay can be held after it has claimed rows, or after it has sent them."""

    async def call(self, function: Any, *args: Any) -> Any:
        act = getattr(function, "__name__", "")
        if os.environ.get("SHOP_HOLD") != act:
            return await super().call(function, *args)
        found = await super().call(function, *args) if act == "claim" else None
        if found or act == "finish":
            note(f"held at {act}")
            while hold_file().exists():  # noqa: ASYNC110 - another process removes it
                await asyncio.sleep(0.02)
        return await super().call(function, *args) if act == "finish" else found


def open_engine(url: str) -> Engine:
    """Return an engine that keeps no connection."""
    return create_engine(url, poolclass=NullPool)


def open_async_engine(url: str) -> AsyncEngine:
    """Return an engine with an asynchronous driver that keeps no connection."""
    return create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"), poolclass=NullPool)


def make_app(url: str, *, asynchronous: bool = False, **options: Any) -> App:
    """Return the app. asynchronous: whether its relay has an asynchronous engine."""
    engine = open_async_engine(url) if asynchronous else open_engine(url)
    app = App("shop", outbox=HeldOutbox(engine, **{"poll": 0.05, **options}))

    @app.task
    async def invoice(ctx: Context, order: int) -> int:
        note(f"invoice {order}")
        return order * 100

    @app.task(unique=Unique("while_queued", by="order", keep="last"))
    async def remind(ctx: Context, order: int, text: str) -> str:
        note(f"remind {order} {text}")
        return text

    return app


if "SHOP_DATABASE" in os.environ:
    app = make_app(os.environ["SHOP_DATABASE"], lease=float(os.environ.get("SHOP_LEASE", "30")))
