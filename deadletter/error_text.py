"""Text of foreign exceptions, whose methods may do anything."""

from __future__ import annotations

import traceback


def error_text(error: BaseException) -> str:
    """Return `str(error)`, or what that raises: also `SystemExit` and `KeyboardInterrupt`, which would end a worker."""
    try:
        return str(error)
    except BaseException as broken:  # noqa: BLE001 - see above
        return f"<no message: str() raised {type(broken).__name__}>"


def traceback_text(error: BaseException) -> str:
    """Return the formatted traceback of an error, with its causes."""
    try:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException as broken:  # noqa: BLE001 - it calls methods of the error
        lines = "".join(traceback.format_tb(error.__traceback__))
        return f"{lines}<no causes: {type(broken).__name__} was raised by a method of {type(error).__qualname__}>\n"
