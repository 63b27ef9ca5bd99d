"""Context variables that an async step sets, which are set back after it: a resumed run does not call the step.

A step in a thread runs in a copy of the context. An async one runs in the asyncio task of its caller, and most never
set a variable. So the first call of a function runs in a copy, which costs some 2 us, and so do later ones if it has
set a variable. Of any other function, only the difference is looked for.
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context, copy_context
from typing import Any, Final

_PURE: dict[int, types.CodeType] = {}
"""Code that has not set a variable, by its id: the hash of code is slow."""

_MAX: Final = 10_000
_UNSET: Final = object()


def contained(awaitable: Awaitable[Any], *, always: bool = False) -> Awaitable[Any]:
    """Return an awaitable of a step that sets no variables here, but for the rare case that `set_back` handles.

    always: also in that case, whatever it costs.
    """
    if type(awaitable) is types.CoroutineType:
        code = awaitable.cr_code
        return awaitable if id(code) in _PURE and not always else _in_copy(awaitable, code)
    return _in_copy(awaitable, None) if isinstance(awaitable, Coroutine) else awaitable


@types.coroutine
def _in_copy(driven: Coroutine[Any, Any, Any], code: types.CodeType | None) -> Generator[Any, Any, Any]:
    """Run a coroutine in a copy of the context, in the same asyncio task."""
    before, context = copy_context(), copy_context()
    run, send = context.run, driven.send
    try:
        waiting = run(send, None)
        while True:
            try:
                sent = yield waiting
            except GeneratorExit:
                run(driven.close)
                raise
            except BaseException as error:  # noqa: BLE001 - such as a cancellation
                waiting = run(driven.throw, error)
            else:
                waiting = run(send, sent)
    except StopIteration as end:
        if code is not None and not _changed(before, context):
            if len(_PURE) >= _MAX:
                _PURE.clear()
            _PURE[id(code)] = code
        return end.value


def driven_by(awaited: object) -> Coroutine[Any, Any, Any] | None:
    """Return the coroutine that runs in a copy of the context, for stacks; None for any other awaited object."""
    frame = getattr(awaited, "gi_frame", None)
    return frame.f_locals["driven"] if frame is not None and frame.f_code is _in_copy.__code__ else None


def _code_of(fn: Callable[..., Any]) -> types.CodeType | None:
    """Return the code of a function, also of a method, a partial or an object that is called."""
    try:
        found: Any = fn.__code__
    except AttributeError:
        found = getattr(getattr(fn, "func", getattr(fn, "__call__", None)), "__code__", None)  # noqa: B004
    return found if isinstance(found, types.CodeType) else None


def _changed(before: Context, after: Context) -> bool:
    try:
        return before != after
    except Exception:  # noqa: BLE001 - values may have any `__eq__`
        return True


def set_back(before: Context, fn: Callable[..., Any]) -> None:
    """Set the context variables back to their values before a call of a function.

    One that had no value and has no default stays set, this time: the next call runs in a copy.
    """
    after = copy_context()
    try:
        if before == after:  # as nearly always: they share their data
            return
    except Exception:  # noqa: BLE001, S110 - values may have any `__eq__`
        pass
    code = _code_of(fn)
    if code is not None:
        _PURE.pop(id(code), None)
    for variable, value in after.items():
        former = before.get(variable, _UNSET)
        if former is value:
            continue
        if former is _UNSET:
            try:
                former = Context().run(variable.get)
            except LookupError:
                continue
        variable.set(former)
    for variable, value in before.items():
        if variable not in after:
            variable.set(value)
