"""What the demo shows on stderr while it works: one moving line in a terminal, one line per event elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from .journal import Journal
from .replicas import Kill
from .takeovers import Takeover, takeovers

__all__ = ["Progress", "bar"]

BAR_WIDTH = 56


@dataclass(slots=True)
class Progress:
    """Call `scene` when the next part begins, `follow` for the task whose steps are to be watched."""

    console: Console
    _live: Live | None = None
    _scene: str = ""
    _journal: Journal | None = None
    _task: str = ""
    _steps: int = 0
    _kills: list[Kill] = field(default_factory=list)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(console=self.console, get_renderable=self._render, transient=True, refresh_per_second=10)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def scene(self, text: str) -> None:
        """Say what is being done now."""
        self._scene = text
        if self._live is None:
            self.console.print(Text(text), soft_wrap=True)

    def follow(self, journal: Journal, task: str, steps: int) -> None:
        """Watch a task of so many steps."""
        self._journal, self._task, self._steps = journal, task, steps
        self.scene(f"auditing in {steps:,} steps, under kills")

    def killed(self, kill: Kill) -> None:
        """Show a kill."""
        self._kills.append(kill)
        if self._live is None:
            self.console.print(
                Text(f"killed worker {kill.pid} at step {self._takeovers()[-1].begun:,} of {self._steps:,}")
            )

    def _takeovers(self) -> list[Takeover]:
        return [] if self._journal is None else takeovers(self._journal.of(self._task), self._kills)

    def _render(self) -> RenderableType:
        scene = Text(self._scene, style="dim")
        if self._journal is None:
            return scene
        done = len({line.step for line in self._journal.of(self._task)})
        found = self._takeovers()
        marks = [takeover.begun for takeover in found]
        moving = bar(done, self._steps, marks, ascii_only=self.console.options.ascii_only)
        return Group(scene, Text.assemble(moving, f"  {done:,} of {self._steps:,} steps"), *map(_line, found))


def _line(takeover: Takeover) -> Text:
    went_on = "its lease must pass" if takeover.seconds is None else f"another went on after {takeover.seconds:.2f} s"
    return Text(f"killed worker {takeover.worker} at step {takeover.begun:,}: {went_on}")


def bar(done: int, steps: int, marks: list[int], *, ascii_only: bool = False) -> Text:
    """Steps as a bar, with a mark at each step where a worker was killed."""
    full, empty, mark = ("#", "-", "X") if ascii_only else ("━", "─", "✗")
    filled = BAR_WIDTH * done // steps
    marked = {min(BAR_WIDTH - 1, BAR_WIDTH * step // steps) for step in marks}
    text = Text()
    for cell in range(BAR_WIDTH):
        if cell in marked:
            text.append(mark, "bold red")
        else:
            text.append(full if cell < filled else empty, "green" if cell < filled else "dim")
    return text
