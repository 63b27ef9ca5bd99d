"""What a person sees when a command fails: one line on stderr that says what, why and what now, and an exit code.

    0    done
    1    refused or failed: Redis is away, the task is dead, nothing of that id
    2    misuse: an option, an argument or an APP that cannot be meant
    130  interrupted from the keyboard

An error that Perdure did not raise on purpose is its own fault, and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from ....queues import BadAddress, InvalidKey, PerdureError, Refused, TaskFailed, Unavailable
from ...errors import ConfigurationError
from .output import note

__all__ = ["Failed", "Misuse", "explained"]


class Failed(Exception):
    """A command that could not do what it was asked to. Its text is the line that is shown."""

    exit_code = 1


class Misuse(Failed):
    """A command that was called in a way that cannot be meant; nothing was done."""

    exit_code = 2


_REMEDIES: tuple[tuple[type[PerdureError], str, str], ...] = (
    (Unavailable, "cannot reach", "start the server, or name another one with --redis-url or PERDURE_REDIS_URL"),
    (Refused, "credentials", "check the user and the password: redis://user:password@host:6379/0"),
    (TaskFailed, "", "'perdure dlq show' has the evidence, 'perdure dlq replay' puts it back on its queue"),
)
"""Kind of error, what its text must contain, and what a person can do."""

_MISUSES = (BadAddress, InvalidKey, ConfigurationError)


@contextmanager
def explained() -> Iterator[None]:
    """Turn what is not a bug into one line on stderr and `typer.Exit`."""
    try:
        yield
    except (Failed, PerdureError, ExceptionGroup) as raised:
        error = _only(raised)
        if isinstance(error, Failed):
            note(str(error))
            raise typer.Exit(error.exit_code) from error
        if not isinstance(error, PerdureError):
            raise
        remedies = [remedy for kind, mark, remedy in _REMEDIES if isinstance(error, kind) and mark in str(error)]
        note("; ".join([str(error).rstrip("."), *remedies]))
        raise typer.Exit(2 if isinstance(error, _MISUSES) else 1) from error


def _only(error: Exception) -> Exception:
    """The one error within groups that task groups have put around it."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
