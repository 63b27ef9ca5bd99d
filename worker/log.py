"""The log of a worker: one line per event on stderr, as text or JSON."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from loguru import logger as _logger

if TYPE_CHECKING:
    from loguru import Record

__all__ = ["configure_logging", "log_wait", "logger"]


def _make_printable(record: Record) -> None:
    """Escape control characters, and turn tracebacks and bound stacks into text of the message.

    Names and errors of tasks must not write control characters to a terminal. Tracebacks become text because another
    handler of the application, such as loguru's default one, may show values of variables (`diagnose`), which may be
    secrets. Stacks bound as `stacks` follow the message on separate lines.
    """
    record["message"] = _printable(record["message"])
    stacks = record["extra"].pop("stacks", "")
    for name, value in record["extra"].items():
        if isinstance(value, str):
            record["extra"][name] = _printable(value)
    if stacks:
        record["message"] += f"\n{stacks}"
    raised = record["exception"]
    if raised is not None and raised.type is not None:
        lines = "".join(traceback.format_exception(raised.type, raised.value, raised.traceback))
        record["message"] += "\n" + "\n".join(map(_printable, lines.rstrip().split("\n")))
        record["exception"] = None


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


logger = _logger.patch(_make_printable)


def log_wait(what: str, on_wait: Callable[[], None] | None = None) -> Callable[[Exception], None]:
    """Return a callback for `retry_while_unavailable` that logs the wait of `what` for Redis, then calls `on_wait`."""

    def log(error: Exception) -> None:
        logger.warning(f"could not reach Redis for {what}: {error}; trying again")
        if on_wait is not None:
            on_wait()

    return log


def configure_logging(level: str = "INFO", *, json: bool = False) -> None:
    """Log to stderr. Values of variables are never shown, because they may be secrets."""
    _logger.remove()
    _logger.add(
        sys.stderr,
        level=level,
        format=_line,
        serialize=json,
        backtrace=False,
        diagnose=False,
    )


def _line(record: Record) -> str:
    bound = "".join(f" {name}={{extra[{name}]}}" for name in record["extra"])
    return f"{{time:HH:mm:ss.SSS}} <level>{{level: <7}}</level> {{message}}<dim>{bound}</dim>\n{{exception}}"
