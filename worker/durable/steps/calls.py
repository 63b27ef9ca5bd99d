"""Calls of step functions: in the event loop or in a thread, within their time-out.

Constants in the arguments of steps: text that differs between runs or copies of a task, and means the same.

The workspace of each run is a new folder, and a fork or an imported copy of a task has another id. In the digest of a
step's arguments they count as constants, so that the records of earlier runs are found.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path, PosixPath
from typing import Any, Final
from uuid import UUID

import anyio
import orjson

from ....queues.runtime import RUNTIME
from ...errors import StepStillRunning, StepTimeout
from ...resume_warning import warn_once
from ..run import Run
from ..step_files import FOLDER_PREFIX, folder_end
from .codec import fingerprint, is_async
from .current import AlreadyDone, Step, step_here
from .step_thread import StepThread
from .variables import contained


def call_function(
    step: Step,
    run: Run,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float | None,
    digest: str,
    called: str | None,
) -> Awaitable[Any]:
    """Call an async function in the event loop, any other in a thread. called: its name if that is not the step's key.

    Raises `StepTimeout`, and what the function raises.
    """
    if timeout is not None:
        return _call_within(step, run, fn, args, kwargs, timeout, digest, called)
    if is_async(fn):
        return contained(fn(*args, **kwargs))
    call = partial(_call_to_its_end, fn, *args, **kwargs)
    return _in_thread(run, StepThread(run.id, called or step.key, digest, call))


async def _call_within(
    step: Step,
    run: Run,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float,
    digest: str,
    called: str | None,
) -> Any:
    with anyio.move_on_after(timeout):
        return await call_function(step, run, fn, args, kwargs, None, digest, called)
    raise StepTimeout(step.key, timeout)


async def call_in_step(run: Run, fn: Callable[..., Any], *args: Any) -> Any:
    """Call a plain function in a thread for the running step, which is not tried again beside it."""
    step = step_here()
    return await _in_thread(run, StepThread(run.id, "" if step is None else step.key, "", partial(fn, *args)))


async def _in_thread(run: Run, call: StepThread) -> Any:
    return await _completed(await run.threads.run(call))


def _call_to_its_end(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function; an iterator that it returns is read into a list, while it may block and its time-out holds."""
    value = fn(*args, **kwargs)
    return list(value) if isinstance(value, Iterator) else value


async def _completed(value: Any) -> Any:
    """Return what a plain function returned: an awaitable is awaited, an async iterator is read into a list."""
    if isinstance(value, AsyncIterator):
        return [item async for item in value]
    return await contained(value) if isinstance(value, Awaitable) else value


def late_call(run: Run, step: Step, digest: str, called: str | None) -> StepThread | None:
    """Return the call of an earlier try that runs on, or whose result nothing has used yet.

    called: name of a part of another step: the part is identified by its arguments as well.
    """
    late = run.threads.late
    return late.find(run.id, step.key) if called is None else late.find(run.id, called, digest)


async def late_result(run: Run, late: StepThread, digest: str, timeout: float | None) -> AlreadyDone[Any] | None:
    """Wait for a late call and return or raise its result; return None if it had other arguments.

    Raises `StepStillRunning` if it exceeds the time-out again.
    """
    with anyio.move_on_after(timeout):
        await late.wait()
    if not late.ended:
        raise StepStillRunning(late.step, RUNTIME.monotonic() - late.late_since)
    if late.digest != digest:
        run.threads.late.drop(late)
        return None
    run.threads.late.remove(late)
    return AlreadyDone(await _completed(late.result()))


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


_FOLDER: Final = "\0\1"
_ID: Final = "\0\2"
"""In place of a text. JSON has no such characters, so no other arguments have the same digest."""


class Constants:
    """Texts that count as constants in the arguments of a run's steps.

    Attributes:
        texts: Arguments without any of them have no constants.
        shortest: Bytes of the shortest one.
        ids: The task's own id, that of the task that it is a copy of, and so on.
    """

    __slots__ = ("_places", "ids", "shortest", "texts")

    def __init__(self, ids: Sequence[str], folder: Path | None = None) -> None:
        """folder: of the run, if it has a workspace. Recorded results may have the folders of earlier runs."""
        self.ids = tuple(ids)
        self._places: tuple[str, ...] = ()
        if folder is not None:
            place = str(folder.parent.parent)
            names = {place, str(Path.cwd() / place), os.path.realpath(place)}
            self._places = tuple([name.removesuffix("/") for name in sorted(names, key=len, reverse=True)])
        places = [orjson.dumps(f"{place}/{FOLDER_PREFIX}")[1:-1] for place in self._places]
        self.texts = (*places, *(task_id.encode() for task_id in ids))
        self.shortest = min(map(len, self.texts))

    def older(self) -> Constants | None:
        """Return the constants of the task that this one is a copy of, in the folder of this run; None without one."""
        if len(self.ids) == 1:
            return None
        found = Constants(self.ids[1:])
        found._places = self._places
        found.texts, found.shortest = self.texts, self.shortest
        return found

    def replace(self, text: str) -> str:
        """Return a text, or the JSON of it, with the same characters in place of the constants."""
        for place in self._places:
            for written in dict.fromkeys((place, orjson.dumps(place)[1:-1].decode())):
                text = self._without_folders(text, f"{written}/")
        for task_id in sorted(self.ids, key=len, reverse=True):
            text = _without_id(text, task_id)
        return text

    def _without_folders(self, text: str, place: str) -> str:
        parts, start = [], 0
        while (at := text.find(place + FOLDER_PREFIX, start)) >= 0:
            end = folder_end(text, at + len(place), self.ids)
            parts += [text[start:at], _FOLDER] if end > 0 else [text[start : at + len(place)]]
            start = end if end > 0 else at + len(place)
        return "".join([*parts, text[start:]])


def _without_id(text: str, task_id: str) -> str:
    """Replace an id, which may be as short as a letter, where it is not a part of a word."""
    parts, start = [], 0
    while (at := text.find(task_id, start)) >= 0:
        end = at + len(task_id)
        escape = text[at - 2 : at] in _ESCAPES  # which ends with a letter
        inside = (text[at - 1 : at].isalnum() and not escape) or text[end : end + 1].isalnum()
        parts += [text[start:end]] if inside else [text[start:at], _ID]
        start = end
    return "".join([*parts, text[start:]])


_ESCAPES: Final = frozenset((r"\b", r"\f", r"\n", r"\r", r"\t"))


def constants_of(run: Run) -> Constants:
    """Return the constants of a run."""
    if run.constants is None:
        run.constants = Constants((run.id, *run.envelope.copy_of))
    found: Constants = run.constants
    return found


def add_folder(run: Run, folder: Path) -> None:
    """Let the folder of a run's workspace, with all its files, count as a constant."""
    run.constants = Constants(constants_of(run).ids, folder)
