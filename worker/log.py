"""The log of the library: nothing until the program asks for it; then one line per event, as text or JSON.

    configure_logging()                     to stderr, as `perdure worker run` does
    use_stdlib_logging()                    to the standard library's logging, such as for pytest's caplog
    loguru.logger.enable("perdure")         to the loguru handlers of the program

Events are logged with loguru and their ids as bound fields. Findings about a server are the exception: they go to the
standard library's logging, which shows warnings that no handler takes (queues/transport/server_check.py).
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC
from functools import partial
from typing import TYPE_CHECKING, Final

import orjson
from loguru import logger as _logger

if TYPE_CHECKING:
    from loguru import Message, Record

__all__ = ["FirstOfEach", "add_to_json", "configure_logging", "log_wait", "logger", "use_stdlib_logging"]


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
    return partial(_log_wait, what, on_wait)


def _log_wait(what: str, on_wait: Callable[[], None] | None, error: Exception) -> None:
    logger.warning(f"could not reach Redis for {what}: {error}; trying again")
    if on_wait is not None:
        on_wait()


class FirstOfEach:
    """Names whose first event is worth a line. The others come in thousands, and are for DEBUG.

    A message may have any name, so only the first thousand are kept; the events of further ones are for DEBUG, too.
    """

    def __init__(self) -> None:
        self._known: set[tuple[str, ...]] = set()

    def is_first(self, *name: str) -> bool:
        """Whether this is the first event of the name."""
        if name in self._known or len(self._known) >= _NAMES:
            return False
        self._known.add(name)
        return True


def configure_logging(level: str = "INFO", *, json: bool = False) -> None:
    """Log to stderr, in place of all other handlers of loguru.

    Values of variables are never shown, because they may be secrets.

    A program that has loguru handlers of its own calls `loguru.logger.enable("perdure")` instead.

    Args:
        level: lowest level that is logged.
        json: write one JSON object per event instead of text.
    """
    _logger.remove()
    if json:
        _logger.add(_write_json, level=level, format="{message}", backtrace=False, diagnose=False)
    else:
        _logger.add(sys.stderr, level=level, format=_line, backtrace=False, diagnose=False)
    _logger.enable(_LIBRARY)
    stdlib = logging.getLogger(_LIBRARY)
    _remove_receiver(stdlib)
    stdlib.addHandler(_Receiver())
    stdlib.setLevel(_logger.level(level).no)


def use_stdlib_logging() -> None:
    """Log to the standard library's logging: logger `perdure`, with the bound fields as attributes of the record.

    Handlers and levels are those of `logging`. Loguru's default handler, which writes to stderr, is removed.
    """
    for former in (_DEFAULT_HANDLER, *_forwarding):
        with suppress(ValueError):  # it was removed already
            _logger.remove(former)
    stdlib = logging.getLogger(_LIBRARY)
    _remove_receiver(stdlib)
    stdlib.setLevel(logging.NOTSET)
    _forwarding[:] = [_logger.add(_forward, level=0, format="{message}", backtrace=False, diagnose=False)]
    _logger.enable(_LIBRARY)


def add_to_json(**fields: str) -> None:
    """Add fields to each JSON object that this process logs, such as the id of its only worker."""
    _process_fields.update(fields)


_LIBRARY: Final = "perdure"
_NAMES: Final = 1_000
_DEFAULT_HANDLER: Final = 0
"""Loguru's id of the handler that it adds itself."""

_process_fields: dict[str, str] = {}
_forwarding: list[int] = []
"""Loguru's id of the handler that forwards to the standard library, if there is one."""


class _Receiver(logging.Handler):
    """Passes what the library logs by the standard library, such as findings about a server, to loguru."""

    def emit(self, record: logging.LogRecord) -> None:
        def name(event: Record) -> None:
            event["name"] = record.name

        logger.patch(name).opt(exception=record.exc_info).log(record.levelname, "{}", record.getMessage())


def _remove_receiver(stdlib: logging.Logger) -> None:
    for handler in stdlib.handlers[:]:
        if isinstance(handler, _Receiver):
            stdlib.removeHandler(handler)


def _forward(message: Message) -> None:
    record = message.record
    target = logging.getLogger(record["name"])
    level = record["level"].no
    if target.isEnabledFor(level):
        fields = record["extra"]
        text = record["message"] + "".join(f" {name}={value}" for name, value in fields.items())
        error = None if record["exception"] is None else record["exception"].value
        raised = None if error is None else (type(error), error, error.__traceback__)
        entry = logging.LogRecord(
            target.name, level, record["file"].path, record["line"], text, (), raised, record["function"]
        )
        for name, value in fields.items():
            entry.__dict__.setdefault(name, value)
        target.handle(entry)


def _write_json(message: Message) -> None:
    record = message.record
    event = {
        "time": record["time"].astimezone(UTC).isoformat(timespec="milliseconds"),
        "level": record["level"].name,
        "message": record["message"],
        "logger": record["name"],
    }
    raised = record["exception"]
    if raised is not None:  # of another logger; this one has put its traceback into the message
        event["exception"] = "".join(traceback.format_exception(raised.type, raised.value, raised.traceback))
    line = orjson.dumps({**event, **_process_fields, **record["extra"], **event}, default=str)
    sys.stderr.write(f"{line.decode()}\n")
    sys.stderr.flush()


def _line(record: Record) -> str:
    bound = "".join(f" {name}={{extra[{name}]}}" for name in record["extra"])
    return f"{{time:HH:mm:ss.SSS}} <level>{{level: <7}}</level> {{message}}<dim>{bound}</dim>\n{{exception}}"


_logger.disable(_LIBRARY)  # a library is quiet until the program configures its log
