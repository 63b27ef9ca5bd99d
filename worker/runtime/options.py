"""Arguments of a worker, checked before anything is stored, and what no setting changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...queues.errors import ConfigurationError
from ...queues.keys import check_name
from ..app import App


@dataclass(frozen=True)
class WorkerTimings:
    """Intervals and time limits of a worker, in seconds.

    Args:
        release_limit: that cancelled runs have to release their tasks.
        handler_poll: between two checks whether cancelled handlers have ended.
        last_reply: for the replies of Redis while the worker stops.
        sweep_interval: between two sweeps for pending messages, at most: the tasks of a lost host resume within
            lease + 5 s.
        clean_interval: between two rounds of one janitor.
        clean_lock: between two rounds in the fleet, at least: less than the shortest sleep of one janitor.
    """

    release_limit: float = 5.0
    handler_poll: float = 0.02
    last_reply: float = 1.0
    sweep_interval: float = 3.0
    clean_interval: float = 60.0
    clean_lock: float = 25.0


def check_arguments(app: object, concurrency: object, queues: object, name: object) -> None:
    """Raise `ConfigurationError` for an argument of `Worker` that is wrong."""
    if not isinstance(app, App):
        raise ConfigurationError(f"app must be an App, got {app!r}")
    if not isinstance(concurrency, int) or concurrency < 1:
        raise ConfigurationError(f"concurrency must be a whole number, 1 or more, got {concurrency!r}")
    if isinstance(queues, str):
        raise ConfigurationError(f"queues must be a list of names, got {queues!r}: pass [{queues!r}]")
    if queues is not None and not isinstance(queues, Sequence):
        raise ConfigurationError(f"queues must be a list of names, got {queues!r}")
    names = [("queue", queue) for queue in queues or ()]
    if name is not None:
        names.append(("name", name))
    for kind, given in names:
        try:
            check_name(kind, given)
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
