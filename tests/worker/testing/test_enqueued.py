"""assert_enqueued and refute_enqueued: tasks are found by their arguments, in any state."""

from __future__ import annotations

import pytest
from perdure import App, Context
from perdure.queues import ConfigurationError, generate_key
from perdure.testing import assert_enqueued, refute_enqueued, run_until_idle
from perdure.worker.settings import Settings
from pydantic import BaseModel, SecretStr

pytestmark = pytest.mark.integration


class Order(BaseModel):
    number: int
    lines: list[str]


ORDER = Order(number=7, lines=["book"])


@pytest.fixture(params=["", "encrypted"])
def app(request: pytest.FixtureRequest, settings: Settings) -> App:
    keys = {"encryption_keys": SecretStr(generate_key())} if request.param else {}
    app = App("shop", settings=settings.model_copy(update=keys))

    @app.task
    async def ship(ctx: Context, order: Order, express: bool = False, note: str = "") -> int:
        if order.number == 7:
            await ship.options(delay=60).enqueue(Order(number=8, lines=[]), express=True)
        return order.number

    @app.task
    async def other(ctx: Context, order: Order) -> None:
        pass

    return app


async def test_a_task_is_found_by_some_of_its_arguments(app: App) -> None:
    async with app:
        ship = app.tasks["ship"]
        handle = await ship.enqueue(ORDER, note="x" * 2_000_000)
        assert await assert_enqueued(ship, order=ORDER, express=False) == handle
        assert await assert_enqueued(ship) == handle
        await refute_enqueued(ship, order=ORDER, express=True)
        await refute_enqueued(app.tasks["other"])
        await run_until_idle(app)
        later = await assert_enqueued(ship, express=True)
        assert (await assert_enqueued(ship, express=False)).id == handle.id != later.id
        assert await handle.result() == 7


async def test_the_errors_say_what_is_enqueued(app: App) -> None:
    async with app:
        ship = app.tasks["ship"]
        with pytest.raises(AssertionError, match=r"ship\(express=True\) was not enqueued; enqueued: no task of this"):
            await assert_enqueued(ship, express=True)
        await ship.enqueue(Order(number=1, lines=[]))
        with pytest.raises(AssertionError, match=r"enqueued: ship\(express=False, note='', order=Order\(number=1, "):
            await assert_enqueued(ship, express=True)
        with pytest.raises(AssertionError, match=r"ship\(.*\) was enqueued: task [0-9a-f-]+, queued"):
            await refute_enqueued(ship, note="")
        with pytest.raises(ConfigurationError, match=r"task 'ship' has no argument 'to'; it has: order, express, note"):
            await refute_enqueued(ship, to="x")
