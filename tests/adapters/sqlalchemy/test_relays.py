"""Relays that are killed or frozen between the database and Redis, in worker processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from perdure.integrations.sqlalchemy import SqlOutbox
from perdure.testing import PerdureFixture
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from tests.adapters.sqlalchemy.shop import hold_file, lines, make_app, open_engine
from tests.adapters.sqlalchemy.waiting import until

SHOP = "tests.adapters.sqlalchemy.shop:app"

StartWorker = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start_worker(perdure: PerdureFixture, database: str) -> Iterator[StartWorker]:
    """Starts a worker process of the shop, which holds its relay at an act."""
    running: list[subprocess.Popen[bytes]] = []

    def start(hold: str = "") -> subprocess.Popen[bytes]:
        environment = {**os.environ, "SHOP_DATABASE": database, "SHOP_HOLD": hold, "SHOP_LEASE": "1"}
        command = [
            str(Path(sys.executable).with_name("perdure")),
            "worker",
            "run",
            "tests.adapters.sqlalchemy.shop:app",
        ]
        process = subprocess.Popen([*command, "--no-supervisor"], env=environment, cwd=Path(__file__).parents[3])
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()


def enqueue(database: str, *orders: int) -> None:
    invoice = make_app(database).tasks["invoice"]
    with Session(open_engine(database)) as session:
        for order in orders:
            invoice.enqueue_in_sync(session, order)
        session.commit()


def left(database: str) -> int:
    outbox = make_app(database).outbox
    assert isinstance(outbox, SqlOutbox)
    with open_engine(database).connect() as connection:
        return connection.scalar(select(func.count()).select_from(outbox.table)) or 0


@pytest.mark.parametrize("act", ["claim", "finish"])
async def test_a_killed_relay(start_worker: StartWorker, database: str, act: str) -> None:
    """Killed after it claimed the rows, or after it sent them: another relay takes over, and nothing runs twice."""
    hold_file().touch()
    enqueue(database, 1, 2, 3)
    first = start_worker(act)
    await until(lambda: f"held at {act}" in lines(), "the relay is held")
    first.kill()
    first.wait()
    assert left(database) == 3
    start_worker()
    await until(lambda: not left(database), "the outbox is empty")
    await until(lambda: sum(line.startswith("invoice") for line in lines()) >= 3, "the tasks have run")
    enqueue(database, 4)
    await until(lambda: "invoice 4" in lines(), "a later task has run")
    assert sorted(line for line in lines() if line.startswith("invoice")) == [f"invoice {n}" for n in range(1, 5)]


@pytest.mark.parametrize("act", ["claim", "finish"])
async def test_a_frozen_relay_that_wakes(start_worker: StartWorker, database: str, act: str) -> None:
    """Frozen with claimed rows; another relay sends them, their tasks end, and the first one continues."""
    hold_file().touch()
    enqueue(database, 1, 2)
    frozen = start_worker(act)
    await until(lambda: f"held at {act}" in lines(), "the relay is held")
    frozen.send_signal(signal.SIGSTOP)
    start_worker()
    await until(lambda: not left(database), "the outbox is empty")
    await until(lambda: sum(line.startswith("invoice") for line in lines()) >= 2, "the tasks have run")
    hold_file().unlink()
    frozen.send_signal(signal.SIGCONT)
    enqueue(database, 3)
    await until(lambda: "invoice 3" in lines() and not left(database), "a later task has run")
    frozen.terminate()  # it finishes its batch
    await until(lambda: frozen.poll() is not None, "the frozen worker has ended")
    assert sorted(line for line in lines() if line.startswith("invoice")) == [f"invoice {n}" for n in range(1, 4)]
