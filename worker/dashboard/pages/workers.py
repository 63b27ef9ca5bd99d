"""Workers with what each runs, supervisors, and the catalog of tasks."""

from __future__ import annotations

from typing import Final

from ...web.operation import NoInputs
from ...web.operations.catalog import CatalogInputs, list_catalog
from ...web.operations.workers import OneWorker, drain_worker, list_workers, resume_supervisor, show_worker
from ...web.problems import Problem
from ..actions import Action, action
from ..page import Html, PageRequest, page

_ROWS: Final = 100
"""Rows of each table."""


@page("/workers", title="Workers", nav="Workers")
async def workers(request: PageRequest) -> Html:
    """List workers with what each runs, and supervisors."""
    return request.render("workers.html", found=await list_workers(request.call, NoInputs()), rows=_ROWS)


@page("/workers/{worker_id}", title="Worker", nav="Workers")
async def worker(request: PageRequest) -> Html:
    """Show a worker with its health and the tasks that it runs."""
    return request.render("worker.html", found=await show_worker(request.call, _worker(request)), rows=_ROWS)


def _worker(request: PageRequest) -> OneWorker:
    return OneWorker.model_validate(request.path)


@page("/catalog", title="Catalog of tasks", nav="Workers")
async def catalog(request: PageRequest) -> Html:
    """List the tasks that workers have published, with their versions."""
    found = await list_catalog(request.call, request.inputs(CatalogInputs))
    return request.render("catalog.html", found=found, rows=_ROWS)


@action("/workers/{worker_id}/drain", drain_worker, title="Drain a worker", nav="Workers")
async def drain(request: PageRequest) -> Action:
    """Let a worker finish what it runs, and stop."""
    found = (await show_worker(request.call, _worker(request))).worker
    if found.drain is not None:
        detail = f"worker {found.id} drains already: {found.drain_by or 'an operator'} has asked it to"
        raise Problem(409, "drains-already", detail)
    return Action(
        f"Worker {found.id} on {found.host} takes no more tasks, finishes the {found.in_flight} that it runs, and "
        "stops. It cannot be called back. Its process exits with code 0; a supervisor starts no other in its place.",
        button="Drain",
        inputs={"worker_id": found.id},
        then=request.url("workers"),
        back=request.url("worker", worker_id=found.id),
        done=f"Worker {found.id} drains.",
        destructive=True,
    )


@action("/supervisors/{supervisor}/resume", resume_supervisor, title="Resume a supervisor", nav="Workers")
async def resume_one_supervisor(request: PageRequest) -> Action:
    """Resume a supervisor that paused after too many crashes."""
    name = request.path["supervisor"]
    listed = (await list_workers(request.call, NoInputs())).supervisors
    found = next((one for one in listed if one.name == name and one.paused_since), None)
    if found is None:
        raise Problem(404, "supervisor-not-paused", f"supervisor {name!r} is not paused")
    return Action(
        f"Supervisor {name} starts its workers again, and counts crashes from zero. It paused because of: "
        f"{found.why or 'too many crashes'}. Correct the cause first.",
        button="Resume",
        inputs={"supervisor": name},
        then=request.url("workers"),
        done=f"Supervisor {name} is resumed.",
    )
