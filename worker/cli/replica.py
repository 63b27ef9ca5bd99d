"""One worker in this process: on its own, or as the child of a supervisor."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec

import anyio

from ..app import App
from ..observe import configure_logging, logger
from ..runtime import Worker
from ..runtime.link import Link
from ..runtime.signals import stop_on_signals
from .connection import Place
from .loading import load_app
from .parting import end_despite_threads
from .probing import ProbePlace
from .reins import Reins

__all__ = ["run_replica"]


def run_replica(
    place: Place,
    probe: ProbePlace,
    application: str,
    *,
    concurrency: int,
    queues: Sequence[str] | None,
    name: str | None,
    burst: bool,
    settings: Mapping[str, object],
) -> None:
    """Work until told to stop, by a signal or by the supervisor. settings: those of the command line."""
    link = Link.from_environment()
    reins = None if link is None else Reins(link)
    loaded = load_app(application)
    loaded.configure(**place.overrides(), **settings)
    configure_logging(loaded.settings.log_level, json=loaded.settings.log_json)
    _stay()
    if reins is not None:
        reins.wait_for_work(loaded)
    anyio.run(
        _work,
        loaded,
        probe,
        reins,
        concurrency,
        queues,
        name,
        burst,
        backend_options={"use_uvloop": find_spec("uvloop") is not None},
    )


def _stay() -> None:
    """What is loaded by now stays to the end: the garbage collector need not go through it again and again."""
    gc.collect()
    gc.freeze()


async def _work(
    loaded: App,
    probe: ProbePlace,
    reins: Reins | None,
    concurrency: int,
    queues: Sequence[str] | None,
    name: str | None,
    burst: bool,
) -> None:
    link = None if reins is None else reins.link
    runner = Worker(loaded, concurrency=concurrency, queues=queues, name=name, link=link)
    idle = sorted(set(runner.queues) - set(loaded.tasks.queues))
    if idle and (link is None or link.role == "worker"):
        logger.warning("no task of app {!r} is on {}: {} are", loaded.name, ", ".join(idle), loaded.tasks.queues)
    code = 1
    try:
        async with AsyncExitStack() as stack:
            stop = runner.stop if reins is None else reins.take(runner)
            await stack.enter_async_context(stop_on_signals(stop))
            stack.enter_context(probe.serving(runner.health))
            await stack.enter_async_context(runner)
            if reins is not None:
                reins.link.say("ready", worker=runner.id, queues=runner.queues)
            logger.info(
                "{} {} works on {} of namespace {} at {}, {} at once",
                "isolated worker" if link is not None and link.role == "isolated" else "worker",
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
        end_despite_threads(code, lambda: runner.unending)
