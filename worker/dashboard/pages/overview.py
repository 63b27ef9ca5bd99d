"""The overview: queues, workers and running tasks at one moment."""

from __future__ import annotations

from typing import Final

from ...web.operation import NoInputs
from ...web.operations.overview import show_overview
from ..page import Html, PageRequest, page

_ROWS: Final = 100
"""Rows of each table."""


@page("/", title="Overview", nav="Overview")
async def overview(request: PageRequest) -> Html:
    """Show whether the workers keep up, and what runs."""
    found = await show_overview(request.call, NoInputs())
    queues = sorted(found.queues, key=lambda queue: (-queue.depth - queue.in_flight, queue.queue))
    return request.render("overview.html", found=found, queues=queues[:_ROWS], rows=_ROWS)
