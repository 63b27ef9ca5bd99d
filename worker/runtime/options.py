"""Checks of the arguments of a worker, before anything is stored."""

from __future__ import annotations

from collections.abc import Sequence

from ...queues import check_name
from ..app import App
from ..errors import ConfigurationError

__all__ = ["check_arguments"]


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
