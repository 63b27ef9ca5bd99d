"""Arguments that a step changed in place: a resumed run has the step's result, and not the change."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import PosixPath
from typing import Any, Final
from uuid import UUID

import orjson

from ...resume_warning import warn_once
from .codec import fingerprint

_CONSTANT: Final = frozenset(
    (str, int, float, bool, type(None), bytes, Decimal, UUID, PosixPath, date, datetime, timedelta)
)


def warn_if_changed(
    key: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], before: bytes
) -> None:
    """Warn if arguments of a step that has run are not as before it. before: their canonical JSON.

    Raises `ResumeWarning` where a filter makes it an error.
    """
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) not in _CONSTANT:
            break
    else:
        return
    try:
        after = fingerprint(args, kwargs)[1]
        changed = "" if after == before else f"its argument {_changed(fn, args, kwargs, before, after)}"
    except Exception:  # noqa: BLE001 - what the step added has no JSON form; its result must be recorded
        changed = "one of its arguments"
    if changed:
        step = key.rpartition("/")[2].partition("#")[0]
        warn_once(
            f"step {step!r}: {changed} changed while the step ran; a resumed run has the recorded result and "
            "not the change: return what is new, and let the handler add it"
        )


def _changed(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], before: bytes, after: bytes) -> str:
    """Return the name of the first argument that has changed."""
    old, new = orjson.loads(before), orjson.loads(after)
    place = next((number for number in range(len(args)) if old[number] != new[number]), None)
    if place is None:
        return repr(next((name for name in kwargs if old[-1].get(name) != new[-1].get(name)), "**kwargs"))
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        names = []
    return repr(names[min(place, len(names) - 1)]) if names else str(place + 1)  # the last one may be *args
