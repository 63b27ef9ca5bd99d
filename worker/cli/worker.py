"""`perdure worker`: running workers, and seeing who works."""

from __future__ import annotations

import gc
from enum import StrEnum
from importlib.util import find_spec
from typing import Annotated

import anyio
import typer

from ...queues import Producer, check_name, list_workers
from ..app import App
from ..observe import configure_logging, logger
from ..runtime import Worker
from ..runtime.signals import stop_on_signals
from .connection import Place, connected, placed, redis_now
from .failures import Misuse
from .loading import load_app
from .output import AsJson, ago, duration, print_json, print_table, tell
from .parameters import in_seconds
from .parting import end_despite_threads

__all__ = ["app"]


class Partitions(StrEnum):
    """Which partitions a worker takes from."""

    ALL = "all"
    SHARE = "share"


app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def worker() -> None:
    """Run workers, and see who works."""


@app.command()
@placed
def run(
    place: Place,
    application: Annotated[
        str, typer.Argument(metavar="APP", help="module:attribute or path/to/file.py:attribute.", show_default=False)
    ],
    *,
    queues: Annotated[
        str | None, typer.Option(metavar="A,B", help="Work on these queues. Else on those of the app's tasks.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, metavar="N", help="Tasks to run at once.")] = 16,
    burst: Annotated[bool, typer.Option("--burst", help="End when the queues are empty.")] = False,
    lease: Annotated[
        float | None,
        in_seconds("How long a silent worker keeps its tasks; the same for all workers. Else PERDURE_LEASE, else 15."),
    ] = None,
    grace: Annotated[
        float | None,
        in_seconds("How long running steps may take to end at shutdown. Else PERDURE_GRACE, else 30."),
    ] = None,
    partitions: Annotated[
        Partitions | None,
        typer.Option(
            help="Of its queues' partitions: all, or its share among the workers who share. "
            "Else PERDURE_PARTITIONS, else all.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Begins the worker's id. Else the app's.")] = None,
) -> None:
    """Run a worker until it is told to stop.

    SIGTERM or Ctrl-C: it takes nothing more, lets running steps end and
    hands its tasks to others, at no cost. Again: at once. A third time:
    the process ends, and its tasks are recovered by others.

    Example: perdure worker run tasks.py:app --concurrency 32
    """
    loaded = load_app(application)
    loaded.configure(**place.overrides(), lease=lease, grace=grace, partitions=partitions)
    configure_logging(loaded.settings.log_level, json=loaded.settings.log_json)
    _stay()
    anyio.run(
        _work,
        loaded,
        concurrency,
        _read_queues(queues),
        None if name is None else _checked("--name", "worker name", name),
        burst,
        backend_options={"use_uvloop": find_spec("uvloop") is not None},
    )


def _stay() -> None:
    """What is loaded by now stays to the end: the garbage collector need not go through it again and again."""
    gc.collect()
    gc.freeze()


def _read_queues(text: str | None) -> list[str] | None:
    return None if text is None else [_checked("--queues", "queue", name) for name in dict.fromkeys(text.split(","))]


def _checked(option: str, kind: str, name: str) -> str:
    try:
        return check_name(kind, name)
    except ValueError as error:
        raise Misuse(f"{option}: {error}") from None


async def _work(loaded: App, concurrency: int, queues: list[str] | None, name: str | None, burst: bool) -> None:
    runner = Worker(loaded, concurrency=concurrency, queues=queues, name=name)
    idle = sorted(set(runner.queues) - set(loaded.tasks.queues))
    if idle:
        logger.warning("no task of app {!r} is on {}: {} are", loaded.name, ", ".join(idle), loaded.tasks.queues)
    code = 1
    try:
        async with stop_on_signals(runner.stop), runner:
            logger.info(
                "worker {} works on {} of namespace {} at {}, {} at once",
                runner.id,
                ", ".join(runner.queues),
                loaded.settings.namespace,
                loaded.settings.address.shown,
                runner.concurrency,
            )
            await runner.run(burst=burst)
        logger.info("worker {} stopped: {} ran", runner.id, runner.settled)
        code = 0
    finally:
        end_despite_threads(code)


@app.command("list")
@connected
async def list_(producer: Producer, *, json: AsJson = False) -> None:
    """List the workers that gave a sign of life lately.

    Example: perdure worker list
    """
    workers = await list_workers(producer.gateway, producer.namespace)
    if json:
        print_json([info.summary() for info in workers])
    elif workers:
        since = ago(await redis_now(producer))
        print_table(
            ("worker", "app", "queues", "running#", "of#", "started", "seen", "host", "pid#", "version"),
            [
                (
                    info.id,
                    info.app,
                    ", ".join(info.queues),
                    str(info.in_flight),
                    str(info.concurrency),
                    since(info.started),
                    f"{duration(info.seen)} ago",
                    info.host,
                    str(info.pid),
                    info.version,
                )
                for info in workers
            ],
        )
    else:
        tell(f"no workers in namespace {producer.namespace.name!r} on {producer.address.shown}")
