"""App of the worker that fuzz tests attack: handlers with arguments of all kinds."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any

from perdure import App, Context, Retry
from pydantic import BaseModel

QUICK = Retry(max_attempts=2, base=0.01, jitter=0.0)

app = App("target")


class Link(BaseModel):
    href: str
    weight: float


class Node(BaseModel):
    name: str
    children: list[Node]


@app.task
async def honest(ctx: Context, number: int) -> int:
    return number * 2


@app.task(retry=QUICK)
async def typed(
    ctx: Context,
    number: int,
    ratio: float,
    name: str,
    tags: list[str],
    when: datetime,
    amount: Decimal,
    link: Link,
) -> dict[str, Any]:
    return {"number": number, "ratio": ratio, "name": name, "tags": tags, "when": when, "amount": amount, "link": link}


@app.task(retry=QUICK)
async def echo(ctx: Context, value: Any) -> Any:
    return value


@app.task(retry=QUICK)
async def tree(ctx: Context, root: Node) -> Node:
    return root


@app.task(retry=QUICK)
async def raises(ctx: Context, text: str) -> None:
    raise ValueError(text)


@app.task(retry=QUICK)
async def keeps(ctx: Context, value: Any) -> Any:
    """Its value goes through the checkpoint and the saved progress."""
    return await ctx.step("keep", lambda: value)
