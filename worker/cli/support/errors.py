"""Errors of commands: one line on stderr with the problem and the remedy, and an exit code.

    0    done
    1    refused or failed: Redis is unavailable, the task is dead, no such id
    2    misuse: an invalid option, argument or APP
    130  interrupted from the keyboard
    143  ended by SIGTERM

An error that Perdure does not raise on purpose is a bug and keeps its traceback.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import typer

from ....queues.errors import (
    CatalogError,
    ConfigurationError,
    PerdureError,
    Refused,
    TaskFailed,
)
from .output import note


class Failed(Exception):
    """A command failed. Its text is printed."""

    exit_code = 1


class Misuse(Failed):
    """A command was called with invalid or contradictory arguments, and did nothing."""

    exit_code = 2


_REMEDIES: tuple[tuple[type[PerdureError], str, str], ...] = (
    (Refused, "roles with the rights", "'perdure doctor --role ROLE' lists all that a user lacks"),
    (Refused, "credentials", "check the user and the password: redis://user:password@host:6379/0"),
    (TaskFailed, "", "see 'perdure dlq show'; 'perdure dlq replay' puts it back on its queue"),
)
"""Error class, text that its message must contain, and remedy."""

_MISUSES = (CatalogError, ConfigurationError)


@contextmanager
def misuse_of(option: str, refused: type[Exception] = ValueError) -> Iterator[None]:
    """Raise `Misuse` for an error about the value of an option."""
    try:
        yield
    except refused as error:
        raise Misuse(f"{option}: {error}") from None


@contextmanager
def explained() -> Iterator[None]:
    """Print expected errors as one line on stderr, and raise `typer.Exit` with their exit code."""
    try:
        yield
    except EXPECTED as raised:
        found = explanation(raised)
        if found is None:
            raise
        note(found.text)
        raise typer.Exit(found.exit_code) from raised


EXPECTED: Final = (Failed, PerdureError, ExceptionGroup)
"""Errors that may be expected ones; see `explanation`."""


class ExpectedError(NamedTuple):
    """Text and exit code of an expected error."""

    text: str
    exit_code: int


def explanation(raised: Exception) -> ExpectedError | None:
    """Return the text and the exit code of an expected error, with its remedy; None for any other."""
    error = _unwrap(raised)
    if isinstance(error, Failed):
        return ExpectedError(str(error), error.exit_code)
    if not isinstance(error, PerdureError):
        return None
    remedies = [remedy for kind, mark, remedy in _REMEDIES if isinstance(error, kind) and mark in str(error)]
    return ExpectedError("; ".join([str(error).rstrip("."), *remedies]), 2 if isinstance(error, _MISUSES) else 1)


def cause_of(error: Exception) -> str:
    """Return the text of an error of the system, without its number and the address, which the command names."""
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror) and error.errno:
        return os.strerror(error.errno)
    return str(getattr(error, "strerror", None) or error)


def _unwrap(error: Exception) -> Exception:
    """Return the error inside exception groups of one."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
