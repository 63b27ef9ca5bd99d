"""The log of the library: nothing until the program asks for it; then one line per event, as text or JSON.

    configure_logging()                     to stderr, as `perdure worker run` does
    use_stdlib_logging()                    to the standard library's logging, such as for pytest's caplog
    loguru.logger.enable("perdure")         to the loguru handlers of the program

In a process that the library owns, such as a worker of `perdure worker run`, `configure_process_log` also takes what
the app and its libraries log with the standard library, unless the app has configured that itself.

Events are logged with loguru and their ids as bound fields. Findings about a server are the exception: they go to the
standard library's logging, which shows warnings that no handler takes (queues/transport/server_check.py).
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import orjson
from loguru import logger as _logger

from ..deadletter.error_text import traceback_text
from ..queues.runtime import RUNTIME

if TYPE_CHECKING:
    from loguru import Message, Record


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
        lines = "" if raised.value is None else traceback_text(raised.value)
        record["message"] += "\n" + "\n".join(map(_printable, lines.rstrip().split("\n")))
        record["exception"] = None


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


logger = _logger.patch(_make_printable)


def log_wait(what: str, on_wait: Callable[[], None] | None = None) -> Callable[[Exception], None]:
    """Return a callback for `retry_while_unavailable` that logs the wait of `what` for Redis, then calls `on_wait`."""
    return partial(_log_wait, what, on_wait)


def _log_wait(what: str, on_wait: Callable[[], None] | None, error: Exception) -> None:
    logger.warning(f"could not reach Redis for {what}: {getattr(error, 'problem', error)}; trying again")
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


class LineLimit:
    """A limit of lines about one kind of event: above ten in a second, others are for DEBUG, and a line counts them.

    That line follows when fewer come, every ten seconds while many come, and with `report`.
    """

    def __init__(self, text: str) -> None:
        """text: the line that counts them, with a place for the count and one for the seconds."""
        self._text = text
        self._second = 0.0
        self._in_second = 0
        self._left_out = self._recent = 0
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def admits(self) -> bool:
        """Count an event of the running loop. Return whether it has a line of its own."""
        now = RUNTIME.monotonic()
        if now - self._second >= 1.0:
            self._second, self._in_second = now, 0
        self._in_second += 1
        self._recent += 1
        if self._timer is None:
            if self._in_second <= _LINES:
                return True
            self._since, self._recent = now, 1
            self._check_later()
        self._left_out += 1
        return False

    def report(self) -> None:
        """Log how many events had no line of their own since the last report."""
        left_out, self._left_out = self._left_out, 0
        since, self._since = self._since, RUNTIME.monotonic()
        if left_out:
            logger.info(self._text + "; each is logged at DEBUG", left_out, max(1.0, self._since - since))

    def _check_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(1.0, self._check)

    def _check(self) -> None:
        recent, self._recent = self._recent, 0
        if recent > _LINES:
            self._check_later()
            if RUNTIME.monotonic() - self._since >= _REPORT:
                self.report()
        else:
            self._timer = None
            self.report()


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


def configure_process_log(
    level: str = "INFO", *, json: bool = False, fields: Callable[[], Mapping[str, str]] = dict
) -> None:
    """Log all of a process that the library owns to stderr: what the library, the app and its libraries log.

    An app that has given the root logger of the standard library a handler keeps its own configuration of that.

    Args:
        level, json: see `configure_logging`.
        fields: returns what is bound to a record of the standard library, such as the id of the running task.
    """
    configure_logging(level, json=json)
    root = logging.getLogger()
    _remove_receiver(root)
    if root.handlers:
        return
    _remove_receiver(logging.getLogger(_LIBRARY))  # the root logger gets its records
    root.addHandler(_Receiver(fields))
    if root.level == logging.WARNING:  # not set by the app
        root.setLevel(_logger.level(level).no)
    logging.captureWarnings(True)


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
_LINES: Final = 10
"""Lines about one kind of event in a second."""

_REPORT: Final = 10.0
"""Seconds between two lines that count the others."""

_ATTRIBUTES: Final = frozenset({*vars(logging.LogRecord("", 0, "", 0, "", (), None)), "message", "asctime", "taskName"})
"""Attributes that each record of the standard library has, in some version of Python."""

_PASSING: Final = ContextVar("perdure_log_passing", default=False)
"""Whether an event is being passed from loguru to the standard library, or the other way."""

_DEFAULT_HANDLER: Final = 0
"""Loguru's id of the handler that it adds itself."""

_process_fields: dict[str, str] = {}
_forwarding: list[int] = []
"""Loguru's id of the handler that forwards to the standard library, if there is one."""


class _Receiver(logging.Handler):
    """Passes records of the standard library to loguru: those of one logger and the loggers below it."""

    def __init__(self, fields: Callable[[], Mapping[str, str]] = dict) -> None:
        """fields: returns what is bound to a record."""
        super().__init__()
        self._fields = fields

    def emit(self, record: logging.LogRecord) -> None:
        if _PASSING.get():
            return  # it comes from loguru, by `use_stdlib_logging`

        def name(event: Record) -> None:
            event["name"] = record.name

        try:
            level: str | int = _logger.level(record.levelname).name
        except ValueError:  # a level of the app
            level = record.levelno
        bound = _own_fields(record) | dict(self._fields())
        if record.stack_info:
            bound["stacks"] = record.stack_info
        raised = record.exc_info if record.exc_info and record.exc_info[0] is not None else None
        token = _PASSING.set(True)
        try:
            logger.patch(name).bind(**bound).opt(exception=raised).log(level, "{}", _text_of(record))
        finally:
            _PASSING.reset(token)


def _text_of(record: logging.LogRecord) -> str:
    try:
        text = record.getMessage()
    except Exception as error:  # noqa: BLE001 - arguments that do not fit the text, which logging only reports
        return f"{record.msg} (could not format: {type(error).__name__}: {error})"
    if record.name == "py.warnings":
        return text.strip().partition("\n  ")[0]  # without the line of code
    return text


def _own_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return what the caller has passed as `extra`, and the name of the logger if it is not one of the library."""
    own = {name: value for name, value in vars(record).items() if name not in _ATTRIBUTES and name.isidentifier()}
    return own if record.name.partition(".")[0] == _LIBRARY else {"logger": record.name} | own


def _remove_receiver(stdlib: logging.Logger) -> None:
    for handler in stdlib.handlers[:]:
        if isinstance(handler, _Receiver):
            stdlib.removeHandler(handler)


def _forward(message: Message) -> None:
    if _PASSING.get():
        return  # it comes from the standard library
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
        token = _PASSING.set(True)
        try:
            target.handle(entry)
        finally:
            _PASSING.reset(token)


def _write_json(message: Message) -> None:
    record = message.record
    event: dict[str, object] = {
        "time": record["time"].astimezone(UTC).isoformat(timespec="milliseconds"),
        "level": record["level"].name,
        "message": record["message"],
        "logger": record["name"],
    }
    raised = record["exception"]
    if raised is not None:  # of another logger; this one has put its traceback into the message
        event["exception"] = "" if raised.value is None else traceback_text(raised.value)
    fields = _process_fields | record["extra"]
    try:
        line = orjson.dumps(fields | event, default=str)
    except TypeError:  # such as a number or a key that JSON does not have
        line = orjson.dumps({name: _printable(str(value)) for name, value in fields.items()} | event)
    sys.stderr.write(f"{line.decode()}\n")
    sys.stderr.flush()


def _line(record: Record) -> str:
    bound = "".join(f" {name}={{extra[{name}]}}" for name in record["extra"])
    return f"{{time:HH:mm:ss.SSS}} <level>{{level: <7}}</level> {{message}}<dim>{bound}</dim>\n{{exception}}"


_logger.disable(_LIBRARY)  # a library is quiet until the program configures its log
