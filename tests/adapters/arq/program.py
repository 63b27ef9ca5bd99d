"""A program in arq's form, which notes its calls, and whose functions also use steps and waits."""

from __future__ import annotations

from typing import Any

from perdure import Context

from tests.adapters.support.journal import note, note_async


def reserve(order: str) -> str:
    note(f"reserve {order}")
    return f"seat of {order}"


async def whole(ctx: dict[str, Any], order: str) -> str:
    await note_async(f"whole {order}")
    return order


async def in_steps(ctx: dict[str, Any], order: str) -> list[str]:
    task: Context = ctx["perdure"]
    first = await task.step("reserve", reserve, order)
    await note_async(f"between {order}")
    return [first, await task.step("confirm", reserve, f"{order} again")]


async def asks(ctx: dict[str, Any], order: str) -> str:
    task: Context = ctx["perdure"]
    await task.step("reserve", reserve, order)
    return f"{order} {await task.wait_for('approval', str)}"


class WorkerSettings:
    functions = [whole, in_steps, asks]  # noqa: RUF012 - as in arq's documentation
