"""The runner of the commands: it makes a command of a function, and prints what the function returns.

The annotation of the function's result says which options the runner adds and how it prints:

    Output                  one document: --json
    Listing                 a list of rows: --json, --wide
    LiveListing             a list that can be drawn again and again: --json, --wide, --watch
    LongListing             the same, printed as its rows are read
    Screen                  a live screen until Ctrl-C: --json, --wide
    AsyncIterator[Output]   lines, printed as they come: --json
    None                    the function prints by itself: no option

A function that declares one of these options receives its value. A parameter whose type is an `OptionGroup` becomes the
options of the group. Errors are translated to exit codes in errors.py.
"""

from __future__ import annotations

import functools
import inspect
import signal
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, contextmanager
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, get_origin, get_type_hints

import anyio
import typer

from .errors import Misuse
from .output import (
    AsJson,
    Column,
    JsonArray,
    LongTable,
    Part,
    StderrText,
    Table,
    note,
    print_json,
    print_json_lines,
    print_parts,
    rendered,
    stdout,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

R = TypeVar("R")

Wide = Annotated[bool, typer.Option("--wide", help="Print all columns, and no cell cut.")]
Watch = Annotated[bool, typer.Option("--watch", help="Draw the list again every two seconds until Ctrl-C.")]

REFRESH: Final = 2.0
"""Seconds between two drawings of a live view."""


class Output:
    """Result of a command.

    Args:
        data: Document that `--json` prints.
        parts: Text, fields and tables that are printed otherwise; None is left out.
        notes: Messages that follow on stderr in both cases; None is left out.
        failure: Error that ends the command after the output.
        lines: Whether `data` is a sequence of documents, one per line.
    """

    def __init__(
        self,
        data: Any,
        *parts: Part | None,
        notes: Iterable[str | None] = (),
        failure: Exception | None = None,
        lines: bool = False,
    ) -> None:
        self.data = data
        self.parts = [part for part in parts if part is not None]
        self.notes = [text for text in notes if text is not None]
        self.failure = failure
        self.lines = lines


def line(data: Any, text: str | None) -> Output:
    """Return an output of one line, as JSON or as text."""
    return Output([data], text, lines=True)


class Listing(Output):
    """Rows of one kind.

    Args:
        empty: Message in place of an empty table; None if the notes say it.
        data: Document of `--json`. Default: the rows' `summary()`.
    """

    def __init__(
        self,
        columns: Sequence[Column[R]],
        rows: Sequence[R],
        *,
        empty: str | None,
        notes: Iterable[str | None] = (),
        data: Any = None,
        lines: bool = False,
    ) -> None:
        summaries: Sequence[Any] = rows
        data = [row.summary() for row in summaries] if data is None else data
        shown = Table(columns, rows) if rows else None if empty is None else StderrText(empty)
        super().__init__(data, shown, notes=notes, lines=lines)


class LiveListing(Listing):
    """Rows of one kind, for a command that can draw them again."""


class LongListing(LiveListing):
    """Rows of one kind that are printed as they are read, so that a list of any length takes little memory.

    Args:
        rows: Yields the rows. They are read while they are printed.
        empty: Message in place of an empty table; None if the notes say it.
        ended: Returns the messages that follow on stderr, once the rows are read.
    """

    def __init__(
        self,
        columns: Sequence[Column[R]],
        rows: AsyncIterable[R],
        *,
        empty: str | None,
        ended: Callable[[], Iterable[str | None]] = tuple,
    ) -> None:
        super().__init__(columns, (), empty=empty)
        self.columns = columns
        self.rows = rows
        self._empty = empty
        self._ended = ended

    async def batches(self) -> AsyncIterator[list[Any]]:
        """Yield the rows, the first ones as soon as they are read."""
        batch: list[Any] = []
        size = _FIRST_BATCH
        async for row in self.rows:
            batch.append(row)
            if len(batch) == size:
                yield batch
                batch, size = [], _BATCH
        if batch:
            yield batch

    def end(self) -> Output:
        """Return what follows the rows."""
        return Output((), notes=self._ended(), lines=True)

    async def read(self) -> Listing:
        """Return the list with all rows, for a view that is drawn again."""
        rows = [row async for row in self.rows]
        return Listing(self.columns, rows, empty=self._empty, notes=self._ended())


_FIRST_BATCH: Final = 50
_BATCH: Final = 500
"""Rows that are printed at once, after the first ones."""


class Screen(Output):
    """Parts that a command draws again until Ctrl-C."""


class OptionGroup:
    """Base of dataclasses whose fields are options that several commands share."""


@dataclass(frozen=True, slots=True)
class Resource:
    """First argument of a function, which the runner opens from options.

    Args:
        options: Group of the options.
        open: Opens it, for one call of the function.
        now: Returns the time in milliseconds by it. Default: the time of this host.
        adapt: Returns the other arguments of the function for it.
    """

    options: type[OptionGroup]
    open: Callable[[Any], AbstractAsyncContextManager[Any]]
    now: Callable[[Any], Awaitable[int]] | None = None
    adapt: Callable[[Any, Mapping[str, Any]], dict[str, Any]] | None = None


def command(function: Callable[..., Any], resource: Resource | None = None) -> Callable[..., None]:
    """Make a command of a function. resource: opened for each call, and passed as the first argument."""
    own = inspect.signature(function, eval_str=True)
    parameters = list(own.parameters.values())[resource is not None :]
    groups = {one.name: one.annotation for one in parameters if _is_group(one.annotation)}
    exposed = [
        option for one in parameters for option in (_options_in(groups[one.name]) if one.name in groups else [one])
    ]
    declared = {parameter.name for parameter in exposed}
    added = [_option(name, kind, False) for name, kind in _options_of(own.return_annotation) if name not in declared]
    exposed += [*added, *([] if resource is None else _options_in(resource.options))]
    asynchronous = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)

    @functools.wraps(function)
    def called(**given: Any) -> None:
        view = _View(*(bool(given.get(name)) for name in ("json", "wide", "watch")))
        for option in added:
            del given[option.name]
        place = None if resource is None else _take(resource.options, given)
        call = functools.partial(function, **{name: _take(group, given) for name, group in groups.items()}, **given)
        if asynchronous:
            live = view.watch or (own.return_annotation is Screen and not view.json)
            with _ending_like_an_interrupt():
                anyio.run(functools.partial(_run, call, resource, place, view, live=live))
        else:
            view.print(call(), _wall_clock())

    exposed = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in exposed]
    called.__signature__ = inspect.Signature(exposed)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in exposed}
    return called


@contextmanager
def _ending_like_an_interrupt() -> Iterator[None]:
    """Let SIGTERM cancel the command, as Ctrl-C does, so that it says what it did; then exit with 128 + the signal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ended = False

    def end(_number: int, _frame: object) -> None:
        nonlocal ended
        ended = True
        signal.raise_signal(signal.SIGINT)

    former = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        if ended:
            raise typer.Exit(128 + signal.SIGTERM) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, former)


def _is_group(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, OptionGroup)


def _options_in(group: Any) -> list[inspect.Parameter]:
    kinds = get_type_hints(group, include_extras=True)
    return [_option(one.name, kinds[one.name], one.default) for one in fields(group)]


def _take(group: Any, given: dict[str, Any]) -> Any:
    """Return a group with its options, which are removed from the given ones."""
    return group(**{one.name: given.pop(one.name) for one in fields(group)})


def _option(name: str, kind: Any, default: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _options_of(result: Any) -> Sequence[tuple[str, Any]]:
    """Return the options of a command whose function returns this type."""
    if result is None:
        return ()
    result = get_origin(result) or result
    options: list[tuple[str, Any]] = []
    if issubclass(result, (Listing, Screen)):
        options.append(("wide", Wide))
    if issubclass(result, LiveListing):
        options.append(("watch", Watch))
    return (*options, ("json", AsJson))


@dataclass(frozen=True, slots=True)
class _View:
    """Form of the output, by the options."""

    json: bool
    wide: bool
    watch: bool

    def __post_init__(self) -> None:
        if self.watch and self.json:
            raise Misuse("--watch is for people and --json for programs: give one of them")

    def has_times(self, output: Output | None) -> bool:
        return output is not None and not self.json and not all(isinstance(part, str) for part in output.parts)

    def print(self, output: Output | None, now: int) -> None:
        """Print an output, and raise its failure. now: milliseconds, to which times are relative."""
        if output is None:
            return
        if self.json and output.lines:
            print_json_lines(output.data)
        elif self.json:
            print_json(output.data)
        else:
            print_parts(output.parts, now, wide=self.wide)
        for text in output.notes:
            note(text)
        if output.failure is not None:
            raise output.failure

    async def stream(self, listing: LongListing, now: int) -> None:
        """Print the rows of a long list as they are read. now: milliseconds, to which times are relative."""
        empty = True
        table, documents = LongTable(listing.columns, now, wide=self.wide), JsonArray()
        async for batch in listing.batches():
            empty = False
            if self.json:
                documents.add([row.summary() for row in batch])
            else:
                table.add(batch)
        if self.json:
            documents.end()
        elif empty:
            print_parts(listing.parts)
        self.print(listing.end(), now)


async def _run(call: functools.partial[Any], resource: Resource | None, place: Any, view: _View, *, live: bool) -> None:
    async with AsyncExitStack() as stack:
        opened = None
        if resource is not None:
            opened = await stack.enter_async_context(resource.open(place))
            given = call.keywords if resource.adapt is None else resource.adapt(opened, call.keywords)
            call = functools.partial(call.func, opened, **given)

        async def now() -> int:
            return _wall_clock() if resource is None or resource.now is None else await resource.now(opened)

        async def draw(width: int) -> RenderableType:
            output = await call()
            if isinstance(output, LongListing):
                output = await output.read()
            return rendered(output.parts, await now(), width=width, wide=view.wide)

        async def show(output: Output | None) -> None:
            if isinstance(output, LongListing):
                await view.stream(output, 0 if view.json else await now())
            else:
                view.print(output, await now() if view.has_times(output) else 0)

        if live and stdout().is_terminal:
            await show_live(draw)
        elif inspect.isasyncgenfunction(call.func):
            async with aclosing(call()) as outputs:
                async for output in outputs:
                    await show(output)
        else:
            await show(await call())


def _wall_clock() -> int:
    return int(time.time() * 1000)


async def show_live(draw: Callable[[int], Awaitable[RenderableType]]) -> None:
    """Draw what `draw` returns for the width of the terminal, again and again, until SIGINT or SIGTERM."""
    from rich.live import Live

    console = stdout()

    async def refresh() -> None:
        while True:
            screen.update(await draw(console.width), refresh=True)
            await anyio.sleep(REFRESH)

    with (
        anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as stops,
        Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as screen,
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(refresh)
            await anext(stops)
            tasks.cancel_scope.cancel()
