"""File in which a program notes its calls, and in which calls a test holds the program."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from pathlib import Path
from typing import Final

_VARIABLE: Final = "ADAPTER_JOURNAL"
_PAUSE: Final = 0.01


class Journal:
    """Calls of all processes of a test, in their order.

    A call is held while the file beside the journal has its name: the process stays in the call until the test removes
    the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hold = path.with_suffix(".hold")
        path.touch()

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which a process finds the journal."""
        return {_VARIABLE: str(self.path)}

    def hold(self, call: str) -> None:
        """Hold each process that makes this call from now on, in place of the call that was held before."""
        new = self._hold.with_suffix(".new")
        new.write_text(call)
        new.replace(self._hold)

    def release(self) -> None:
        """Let the held processes continue."""
        self._hold.unlink(missing_ok=True)

    def holds(self, call: str) -> bool:
        """Return whether this call is held."""
        try:
            return self._hold.read_text() == call
        except FileNotFoundError:
            return False

    def add(self, call: str) -> None:
        """Append a call of this process."""
        with self.path.open("ab", buffering=0) as file:
            file.write(f"{os.getpid()} {call}\n".encode())

    def calls(self) -> Counter[str]:
        """Return how often each call was made."""
        return Counter(call for _, call in self._lines())

    def callers(self, call: str = "") -> set[int]:
        """Return the processes that made this call, or any."""
        return {process for process, made in self._lines() if call in ("", made)}

    async def noted(self, call: str, times: int = 1, *, timeout: float = 60.0) -> None:
        """Wait until a call was made so often. Raises `TimeoutError`. timeout: seconds."""
        try:
            async with asyncio.timeout(timeout):
                while self.calls()[call] < times:  # noqa: ASYNC110 - a file has no event
                    await asyncio.sleep(_PAUSE)
        except TimeoutError:
            raise TimeoutError(f"{call!r} was not called {times} times in {timeout:g} s: {self.calls()}") from None

    def _lines(self) -> list[tuple[int, str]]:
        complete, _, _ = self.path.read_text().rpartition("\n")
        return [(int(process), call) for process, call in (line.split(" ", 1) for line in complete.splitlines())]


def note(call: str) -> None:
    """Note a call in the journal of the test that started this process, and stay in it while the test holds it.

    Without a journal, as in a test that runs the program itself, nothing is noted.
    """
    if journal := _journal():
        journal.add(call)
        while journal.holds(call):
            time.sleep(_PAUSE)


async def note_async(call: str) -> None:
    """Do as `note`, without blocking the event loop."""
    if journal := _journal():
        journal.add(call)
        while journal.holds(call):  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(_PAUSE)


def _journal() -> Journal | None:
    path = os.environ.get(_VARIABLE)
    return Journal(Path(path)) if path else None
