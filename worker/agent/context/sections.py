"""Sections of a brief, and their shares of a token budget. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

Count = Callable[[str], int]

_NAMED: Final = (8, 3, 1, 0)
"""Most missing entries that a note names, by the room of its section."""

_SHARE: Final = 2
"""Part of the room of a section that its note may take: one in so many."""


@dataclass(slots=True)
class Section:
    """Lines under a heading, and the note about those that are not shown.

    Attributes:
        kind: name of the lines in `left_out`.
        names: names missing lines, given their number and how many of them to name; steps are named in any case.
        remedy: how to get the missing lines.
        always: how many entries are missing in any case.
        least: how many lines are shown even if they do not fit.
        required: whether the section is shown even if not one line of it fits.
        first: whether the first lines stay, else the last ones.
        most: most lines that are shown.
        footer: a last line if one of the shown lines ends with three dots.
        longer: longer forms of each line, the longest first, for which there may be room when all else is shown.
    """

    heading: str
    kind: str
    lines: list[str]
    names: Callable[[int, int], str]
    remedy: str
    always: int = 0
    least: int = 0
    required: bool = False
    first: bool = False
    most: int | None = None
    footer: str = ""
    longer: Sequence[Sequence[str]] = ()
    costs: list[int] = field(default_factory=list)
    kept: int = 0
    named: int = 0

    def missing(self) -> int:
        return len(self.lines) - self.kept

    def text(self) -> str:
        shown = self.lines[: self.kept] if self.first else self.lines[self.missing() :]
        note = [self.missing_line()] if self.missing() + self.always else []
        footer = [self.footer] if self.footer and any(line.endswith("...") for line in shown) else []
        return "\n".join([f"## {self.heading}", *([*shown, *note] if self.first else [*note, *shown]), *footer])

    def missing_line(self) -> str:
        left = self.missing()
        which = "; ".join(part for part in (self.names(left, self.named), self.remedy) if part)
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
        self.named = self._most_named(room, count)
        spent = self.cost(count)
        while spent > room and self.kept > self.least:
            self.kept -= 1
            dropped = self.costs[self.kept] if self.first else self.costs[self.missing() - 1]
            spent = self.cost(count) if self.kept == len(self.lines) - 1 else spent - dropped
        self.name_more(room - spent, count)
        return self.cost(count)

    def _most_named(self, room: int, count: Count) -> int:
        """Return how many missing entries the note can name without taking the room of the others."""
        kept, self.kept = self.kept, 0
        for self.named in _NAMED:
            if count(self.missing_line()) * _SHARE <= room:
                break
        self.kept = kept
        return self.named

    def name_more(self, room: int, count: Count, *, most: int = _NAMED[0]) -> int:
        """Name more of the missing entries if there is room, and return what it leaves."""
        if not self.missing():
            return room
        spent, least = self.cost(count), self.named
        for self.named in _NAMED:
            more = self.cost(count) - spent
            if self.named <= least or (self.named <= most and more <= room):
                return room - more
        return room

    def lengthen(self, room: int, count: Count) -> int:
        """Use longer forms of shown lines, and return the room that they leave.

        The last line is first; no line has its longest form before the others have a shorter one.
        """
        for form in reversed(range(max(map(len, self.longer), default=0))):
            for at in range(min(len(self.lines), len(self.longer)) - 1, self.missing() - 1, -1):
                if form < len(self.longer[at]) and (line := self.longer[at][form]) != self.lines[at]:
                    more = count(line + "\n") - self.costs[at]
                    if 0 < more <= room:
                        room -= more
                        self.lines[at], self.costs[at] = line, self.costs[at] + more
        return room


def fitted(
    sections: Sequence[Section], room: int, count: Count, tools: Collection[str] = ()
) -> tuple[list[str], dict[str, int]]:
    """Return the texts of the sections, and the left-out lines by kind.

    tools: names of the ready-made tools that the model has.

    Each section gets an equal share of the room, then what others leave, in their order. What is left then is for the
    names of missing lines, and for longer forms of those that are shown. Sections of which not even the heading fits
    are named in a line of their own.
    """
    for section in sections:
        section.costs = [count(line + "\n") for line in section.lines]
    shown, hidden = _with_heading(sections, room, count, tools)  # without lines so far
    last = _hidden(hidden, tools)
    least = sum(section.cost(count) for section in shown) + count(last)
    share = max(0, room - least) // max(1, len(shown))
    spent = {id(section): section.fill(section.cost(count) + share, count) for section in shown}
    rest = room - sum(spent.values()) - count(last)
    for section in shown:  # a note without a name says too little
        if not section.named:
            rest = section.name_more(rest, count, most=1)
            spent[id(section)] = section.cost(count)
    for section in shown:
        before = spent[id(section)]
        if section.missing() and rest > 0:
            rest -= section.fill(before + rest, count) - before
    for section in shown:
        rest = section.name_more(rest, count)
    for section in shown:
        rest = section.lengthen(rest, count)
    left_out = {section.kind: section.missing() + section.always for section in sections}
    texts = [section.text() for section in shown]
    return [*texts, last] if last else texts, {kind: number for kind, number in left_out.items() if number}


def _hidden(sections: Sequence[Section], tools: Collection[str]) -> str:
    """Return the line about sections that are not shown, and the tools that return them; empty without any."""
    if not sections:
        return ""
    named = []
    for section in sections:
        names = section.names(len(section.lines), 0)
        named.append(f"{len(section.lines)} under {section.kind!r}{names and f' ({names})'}")
    ways = ["`search_history(section=NAME)` returns those of a section"] if "search_history" in tools else []
    ways += ["`search_memory` finds memories"] if "search_memory" in tools else []
    return f"Not shown for lack of space: {', '.join(named)}{'; ' if ways else ''}{', '.join(ways)}."


def _with_heading(
    sections: Sequence[Section], room: int, count: Count, tools: Collection[str]
) -> tuple[list[Section], list[Section]]:
    """Return the sections that can be shown at least with the number of their entries, and the others."""
    for section in sections:
        section.kept = min(section.least, len(section.lines))
    shown, hidden = list(sections), list[Section]()
    while sum(section.cost(count) for section in shown) + count(_hidden(hidden, tools)) > room:
        last = next((one for one in reversed(shown) if not (one.required or one.least)), None)
        if last is None:
            break
        shown.remove(last)
        last.kept = 0
        hidden.insert(0, last)
    return shown, hidden
