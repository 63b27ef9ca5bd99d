"""Sections of a brief, and their shares of a token budget. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

__all__ = ["Section", "fitted"]

Count = Callable[[str], int]


@dataclass(slots=True)
class Section:
    """Lines under a heading, and the note about those that are not shown.

    Attributes:
        kind: name of the lines in `left_out`.
        note: returns which lines are missing and how to get them, given their number.
        always: how many entries are missing in any case.
        required: whether the section is shown even if not one line of it fits.
        first: whether the first lines stay, else the last ones.
        most: most lines that are shown.
        footer: a last line if one of the shown lines ends with three dots.
        longer: longer forms of each line, the longest first, for which there may be room when all else is shown.
    """

    heading: str
    kind: str
    lines: list[str]
    note: Callable[[int], str]
    always: int = 0
    required: bool = False
    first: bool = False
    most: int | None = None
    footer: str = ""
    longer: Sequence[Sequence[str]] = ()
    costs: list[int] = field(default_factory=list)
    kept: int = 0

    def missing(self) -> int:
        return len(self.lines) - self.kept

    def text(self) -> str:
        shown = self.lines[: self.kept] if self.first else self.lines[self.missing() :]
        note = [self.missing_line()] if self.missing() + self.always else []
        footer = [self.footer] if self.footer and any(line.endswith("...") for line in shown) else []
        return "\n".join([f"## {self.heading}", *([*shown, *note] if self.first else [*note, *shown]), *footer])

    def missing_line(self) -> str:
        left = self.missing()
        which = self.note(left)
        return f"- {left + self.always} {'more' if self.first else 'earlier'} not shown{f': {which}' if which else ''}."

    def cost(self, count: Count) -> int:
        """Return the tokens of the section; the line about missing entries counts as if all were missing."""
        shown = self.costs[: self.kept] if self.first else self.costs[self.missing() :]
        kept, self.kept = self.kept, 0
        note = count(self.missing_line() + "\n") if len(self.lines) - kept + self.always else 0
        self.kept = kept
        return count(f"## {self.heading}\n\n{self.footer}") + sum(shown) + note

    def fill(self, room: int, count: Count) -> int:
        """Show as many lines as fit; return the tokens of the section. It is not smaller than without lines."""
        self.kept = len(self.lines) if self.most is None else min(self.most, len(self.lines))
        spent = self.cost(count)
        while spent > room and self.kept:
            self.kept -= 1
            dropped = self.costs[self.kept] if self.first else self.costs[self.missing() - 1]
            spent = self.cost(count) if self.kept == len(self.lines) - 1 else spent - dropped
        return spent

    def lengthen(self, room: int, count: Count) -> int:
        """Use longer forms of shown lines, the last line first, and return the room that they leave."""
        for at in range(len(self.lines) - 1, self.missing() - 1, -1):
            for line in self.longer[at] if at < len(self.longer) else ():
                more = count(line + "\n") - self.costs[at]
                if more <= room:
                    room -= more
                    self.lines[at], self.costs[at] = line, self.costs[at] + more
                    break
        return room


def fitted(sections: Sequence[Section], room: int, count: Count) -> tuple[list[str], dict[str, int]]:
    """Return the texts of the sections, and the left-out lines by kind.

    Each section gets an equal share of the room, then what others leave, in their order. What is left then is for
    longer forms of the lines. Sections of which not even the heading fits are named in a line of their own.
    """
    for section in sections:
        section.costs = [count(line + "\n") for line in section.lines]
    shown = _with_heading(sections, room, count)  # without lines so far
    least = sum(section.cost(count) for section in shown)
    share = max(0, room - least) // max(1, len(shown))
    spent = {id(section): section.fill(section.cost(count) + share, count) for section in shown}
    rest = room - sum(spent.values())
    for section in shown:
        before = spent[id(section)]
        if section.missing() and rest > 0:
            rest -= section.fill(before + rest, count) - before
    for section in shown:
        rest = section.lengthen(rest, count)
    hidden = [section for section in sections if not any(one is section for one in shown)]
    for section in hidden:
        section.kept = 0
    texts = [section.text() for section in shown]
    if hidden:
        named = ", ".join(f"{len(section.lines)} under {section.heading!r}" for section in hidden)
        texts.append(f"Not shown for lack of space: {named}; `search_history` finds them.")
    left_out = {section.kind: section.missing() + section.always for section in sections}
    return texts, {kind: number for kind, number in left_out.items() if number}


def _with_heading(sections: Sequence[Section], room: int, count: Count) -> list[Section]:
    """Return the sections that can be shown at least with the number of their entries."""
    least = {}
    for section in sections:
        section.kept = 0
        least[id(section)] = section.cost(count)
    room -= sum(least[id(section)] for section in sections if section.required)
    shown = []
    for section in sections:
        if not section.required:
            room -= least[id(section)]
        if section.required or room >= 0:
            shown.append(section)
        elif not section.required:
            room += least[id(section)]
    return shown
