"""A progress bar on stderr, for what turns out to take its time."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Bar"]

_SHOWN_AFTER: Final = 1.0
"""Seconds: what is done sooner needs no bar."""


class Bar:
    """Counts what is done, and shows it on a terminal once a second has passed.

    Where the ids that a command prints run over the same terminal there is no bar: they show that it goes on.
    """

    def __init__(self, what: str, total: int | None = None) -> None:
        """total: None where nobody knows it."""
        self.done = 0
        self._what = what
        self._total = total
        self._began = time.monotonic()
        self._console = Console(stderr=True)
        self._wanted = self._console.is_terminal and not sys.stdout.isatty()
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self, count: int = 1) -> None:
        self.done += count
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=self.done)
        elif self._wanted and time.monotonic() - self._began > _SHOWN_AFTER:
            self._progress = self._show()

    def _show(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        progress = Progress(*columns, console=self._console, transient=True, redirect_stdout=False)
        progress.add_task(self._what, total=self._total, completed=self.done)
        progress.start()
        return progress
