"""The brief: the last part of a prompt, computed from the state at each call. Pure functions.

    # Brief
    You are resuming audit after a crash (2026-03-01 12:00:07 UTC). Continue with step 3 of 9: `s3` Read the log. ...
    Time left: 4 min.                   if little is left; likewise the context window

    ## Left by the former run           until the first step after the resume is recorded
    ## Completed steps
    ## Failed and dropped steps
    ## Later steps
    ## Decisions
    ## Discoveries
    ## Promises
    ## Open questions
    ## Artifacts
    ## Changed files
    ## In flight
    ## Memories for this step

Sections without entries are left out. Every entry is one line of quoted text. A section that does not fit keeps its
latest entries (its first ones, if they are still to be done), and a line says how many are missing, what they are in
short, and which of the model's tools returns them. Steps in doubt, completed steps and what is waited for are named in
any case. Of the promises, those of the agent come first, and of these the one that is due first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

from ....queues.wording import listed, shown_time
from ...durable.journal.quoting import quoted_line, quoted_name
from ...durable.journal.resumption import Resumption
from ..journal.state import AgentState, Commitment, PlanStep, Question, ReplacedStep, StepStatus

_SHORT: Final = 15
"""Most characters of a step's result if the turns hold it too: it only has to be recognized there."""

_LONG: Final = (1_000_000, 600, 150)
"""Most characters of a step's result that the turns do not hold, by the room in the brief: all of it if it fits."""

_NEXT: Final = 1
"""Most later steps that are listed if nothing was interrupted: the plan was made in the turns."""

_CUT: Final = "- Cut (...): `recall_step(KEY)`."
_TITLE: Final = 200


@dataclass(frozen=True, slots=True)
class BriefText:
    """The text of the brief, which may be empty, and the left-out entries by kind."""

    text: str
    left_out: dict[str, int] = field(default_factory=dict)


def brief_text(
    state: AgentState,
    count: Count,
    budget: int,
    *,
    previous: Resumption | None = None,
    full: bool = False,
    held: Collection[str] = (),
    memories: Sequence[str] = (),
    in_flight: Sequence[str] = (),
    tools: Collection[str] = (),
    capacity: Sequence[str] = (),
) -> BriefText:
    """Return the brief within a budget of tokens.

    Args:
        count: counts the tokens of a text.
        full: whether the whole plan is shown, because the turns may not hold it.
        held: keys of the steps whose results the turns hold, so that they only have to be recognized.
        memories: quoted lines.
        tools: names of the ready-made tools that the model has; no other is named.
        capacity: sentences about the time and the context window that are left.
    """
    headline = " ".join(filter(None, (_headline(state, previous), *capacity)))
    found = _sections(state, previous, full, held, memories, in_flight, tools)
    sections = [one for one in found if one.lines or one.always]
    if not headline and not sections:
        return BriefText("")
    head = "\n\n".join(["# Brief", *([headline] if headline else [])])
    texts, left_out = fitted(sections, budget - count(head), count, tools)
    return BriefText("\n\n".join([head, *texts]), left_out)


def _headline(state: AgentState, previous: Resumption | None) -> str:
    place = _place(state)
    if previous is None:
        return place and f"{place[0].upper()}{place[1:]}"
    text = previous.opening()
    if place:
        text += f" {place[0].upper()}{place[1:]}" if place.startswith("all") else f" Continue with {place}"
    elif _has_steps(state, previous) and previous.handoff is not None:
        return f"{text} {previous.handoff.continue_text()}"
    return f"{text} Do not repeat completed steps."


def _has_steps(state: AgentState, previous: Resumption) -> bool:
    """Return whether the steps of the previous run are those of a function, which are in no state."""
    left = previous.handoff
    if left is None or left.agent is not None or state.plan or previous.continues:
        return False
    return bool(left.completed or left.total)


def _place(state: AgentState) -> str:
    """Return which step of the plan is next."""
    total = len(state.plan) + state.archive.steps
    if not total:
        return ""
    at = _next(state)
    if at is None:
        return f"all {total} steps are closed."
    step = state.plan[at]
    notes = [f"attempt {step.attempts}"] if step.attempts > 1 else []
    notes += [f"last error: {quoted_line(step.error)}"] if step.error else []
    noted = f" ({'; '.join(notes)})" if notes else ""
    return f"step {state.archive.steps + at + 1} of {total}: {_named(step)}{noted}."


def _next(state: AgentState) -> int | None:
    """Return the place of the next step in the plan: the current one, else the first open one."""
    found = [at for at, step in enumerate(state.plan) if _is_open(step)]
    return next((at for at in found if state.plan[at].key == state.current), found[0] if found else None)


def _sections(
    state: AgentState,
    previous: Resumption | None,
    full: bool,
    held: Collection[str],
    memories: Sequence[str],
    in_flight: Sequence[str],
    tools: Collection[str],
) -> Iterable[Section]:
    def all_of(section: str) -> str:
        """Return the call of the tool that returns the whole section; empty without the tool."""
        return f'`search_history(section="{section}")` returns all' if "search_history" in tools else ""

    def done_line(step: PlanStep, limit: int) -> str:
        return _done(step, state.results.get(step.key), limit)

    done = [step for step in state.plan if step.status is StepStatus.DONE]
    gone = [step for step in state.plan if step.status in (StepStatus.FAILED, StepStatus.DROPPED)]
    every: Sequence[PlanStep | ReplacedStep] = [*state.replaced, *state.plan]
    given_up: Sequence[PlanStep | ReplacedStep] = [*state.replaced, *gone]
    current = _next(state)
    later = [step for at, step in enumerate(state.plan) if at != current and _is_open(step)]
    promises = _open_promises(state.commitments)
    if previous is not None:
        doubtful = _in_doubt(state, previous)
        yield Section(
            "Left by the former run",
            "former",
            [*doubtful, *_former(state, previous)],
            lambda _left, _max_count: "",
            all_of("former"),
            least=len(doubtful),
            first=True,
        )
    yield Section(
        "Completed steps",
        "steps",
        [done_line(step, _SHORT) for step in done],
        lambda left, most: _ranges(state, done[:left], most),
        f"`recall_step(KEY)` returns the result of one{_retired(state)}" if "recall_step" in tools else "",
        always=state.archive.steps,
        required=True,
        footer=_CUT if "recall_step" in tools else "",
        longer=[() if step.key in held else [done_line(step, limit) for limit in _LONG] for step in done],
    )
    if previous is not None and previous.handoff is not None and _has_steps(state, previous):
        yield Section(
            "Completed steps", "function_steps", previous.handoff.completed_lines(), lambda _left, _max_count: "", ""
        )
    yield Section(
        "Failed and dropped steps",
        "failed",
        [*map(_replaced, state.replaced), *map(_gone, gone)],
        lambda left, most: _keys(every, given_up[:left], most),
        all_of("failed"),
    )
    yield Section(
        "Later steps",
        "open",
        [f"- {_named(step)}" for step in later],
        lambda left, most: _keys(state.plan, later[-left:], most),
        all_of("open") if full else "",  # else the plan is in the turns, and these bytes are in no cache
        first=True,
        most=None if full else _NEXT,
    )
    yield Section(
        "Decisions",
        "decisions",
        list(_decisions(state)),
        lambda left, most: _few([_word(one.choice) for one in state.decisions[:left]], most),
        all_of("decisions"),
    )
    yield Section(
        "Discoveries",
        "discoveries",
        list(_discoveries(state)),
        lambda left, most: _few([_word(one.fact) for one in state.discoveries[:left]], most),
        all_of("discoveries"),
    )
    yield Section(
        "Promises",
        "promises",
        [f"- {_promised(one)}: {quoted_line(one.what)}" for one in promises],
        lambda left, most: _few([f"{_promised(one, 40)}: {_word(one.what)}" for one in promises[-left:]], most),
        all_of("promises"),
        first=True,
    )
    yield Section(
        "Open questions",
        "questions",
        list(_questions(state)),
        lambda left, most: _few([_asked(one) for one in state.questions[-left:]], most),
        all_of("questions"),
        least=int(state.waiting_for is not None),
        first=True,
    )
    yield Section(
        "Artifacts",
        "artifacts",
        [f"- {quoted_name(one.name)} ({one.size:,} bytes)" for one in state.artifacts],
        lambda left, most: _few([_word(one.name) for one in state.artifacts[:left]], most),
        ", ".join(
            way
            for way in (
                all_of("artifacts"),
                "`read_artifact(NAME)` returns the content of one" if "read_artifact" in tools else "",
            )
            if way
        ),
    )
    yield Section(
        "Changed files",
        "files",
        [f"- {quoted_name(one.path)}" for one in state.files],
        lambda left, most: _few([_word(one.path) for one in state.files[:left]], most),
        all_of("files"),
    )
    yield Section(
        "In flight",
        "in_flight",
        [f"- {quoted_line(one)}" for one in in_flight],
        lambda left, most: _few([_word(one) for one in in_flight[-left:]], most),
        "",
        required=bool(in_flight),
        first=True,
    )
    yield Section(
        "Memories for this step",
        "memories",
        list(memories),
        lambda _left, _max_count: "",
        "`search_memory` finds them" if "search_memory" in tools else "",
        first=True,
    )


def _is_open(step: PlanStep) -> bool:
    return step.status in (StepStatus.PENDING, StepStatus.RUNNING)


def _named(step: PlanStep) -> str:
    title = "" if step.title in ("", step.key) else f" {quoted_line(step.title, _TITLE)}"
    return f"{quoted_name(step.key)}{title}"


def _done(step: PlanStep, result: Any, limit: int) -> str:
    return f"- {_named(step)}: {'no result' if result is None else quoted_line(result, limit, brief=True)}"


def _gone(step: PlanStep) -> str:
    error = f": {quoted_line(step.error)}" if step.error else ""
    return f"- {_named(step)} ({step.status.value}{error})"


def _replaced(step: ReplacedStep) -> str:
    why = f": {quoted_line(step.why)}" if step.why else ""
    return f"- {quoted_name(step.key)} {quoted_line(step.title, _TITLE)} (replaced by another plan{why})"


def _in_doubt(state: AgentState, previous: Resumption) -> list[str]:
    """Return what may have taken effect."""
    done = {step.key for step in state.plan if step.status is StepStatus.DONE}
    return [
        f"- in doubt: {doubt.call} started and has no result; look up {quoted_name(doubt.idempotency_key)} before you "
        f"repeat it; an operator decides: {quoted_line(doubt.command)}"
        for doubt in (() if previous.handoff is None else previous.handoff.dependencies.in_doubt)
        if doubt.key not in done
    ]


def _former(state: AgentState, previous: Resumption) -> Iterable[str]:
    """Yield what else the former run left, without what the state says."""
    left = previous.handoff
    for call in () if left is None else left.dependencies.in_flight:
        yield f"- was in flight: {quoted_line(call.call)}; check whether it took effect first"
    if left is not None and left.message and left is not previous.received:
        yield f"- its note: {quoted_line(left.message, 1000)}"
    if previous.noted:
        yield f"- notice to the user: {quoted_line(previous.noted, 1000)}"
    known = [step.error for step in state.plan if step.error]
    for text in () if left is None else left.attention:
        if not any(error in text for error in known):
            yield f"- {quoted_line(text)}"


def _decisions(state: AgentState) -> Iterable[str]:
    for one in state.decisions:
        reasoning = f", because: {quoted_line(one.reasoning)}" if one.reasoning else ""
        rejected = "; ".join(quoted_line(other) for other in one.alternatives)
        yield f"- {quoted_line(one.choice)}{reasoning}{f' (rejected: {rejected})' if rejected else ''}"


def _discoveries(state: AgentState) -> Iterable[str]:
    for one in state.discoveries:
        yield f"- {quoted_line(one.fact)}{f' (source: {quoted_line(one.source)})' if one.source else ''}"


def _open_promises(commitments: Sequence[Commitment]) -> list[Commitment]:
    """Return the open promises: first the agent's own, of these and the others the one that is due first."""
    found = [one for one in commitments if not one.done and not one.wait]  # of a wait, the question stands below
    return sorted(found, key=lambda one: (one.by != "me", inf if one.due is None else one.due.timestamp()))


def _promised(one: Commitment, limit: int = 300) -> str:
    """Return who has promised something, to whom, and until when."""
    by = "you" if one.by == "me" else quoted_line(one.by, limit, brief=True)
    to = "" if not one.to else " to you" if one.to == "me" else f" to {quoted_line(one.to, limit, brief=True)}"
    due = f" (due {shown_time(one.due.timestamp() * 1000)})" if one.due is not None else ""
    return f"promised by {by}{to}{due}"


def _questions(state: AgentState) -> Iterable[str]:
    waiting = state.waiting_for
    if waiting is not None:
        on = f" from {quoted_line(waiting.on)}" if waiting.on else ""
        why = f", because: {quoted_line(waiting.why)}" if waiting.why else ""
        yield f"- waiting for {quoted_line(waiting.what or 'something')}{on}{why}"
    for one in state.questions:
        yield f"- {quoted_line(one.text)}{f' (to {quoted_line(one.to)})' if one.to else ''}"


def _asked(one: Question) -> str:
    return f"{_word(one.text)}{f' to {_word(one.to)}' if one.to else ''}"


def _retired(state: AgentState) -> str:
    """Name the steps whose results are not kept."""
    count = state.archive.retired
    return f", but none of the first {count:,}, which are not kept" if count else ""


def _ranges(state: AgentState, left: Sequence[PlanStep], most: int) -> str:
    """Name completed steps that are not shown: those that left the state by ranges, then those that do not fit."""
    gone = state.archive.ranges
    found = [_range(one.first, one.last) for one in gone]
    if len(found) > max(1, most):
        found = [f"among {_range(gone[0].first, gone[-1].last)}"]
    return ", ".join([*found, *([_keys(state.plan, left, most)] if left else [])])


def _range(first: str, last: str) -> str:
    return quoted_name(first) if first == last else f"{quoted_name(first)} to {quoted_name(last)}"


def _keys(plan: Sequence[PlanStep | ReplacedStep], steps: Sequence[PlanStep | ReplacedStep], most: int) -> str:
    """Name steps one by one, or by ranges of steps that follow one another in the plan, or from the first to the last.

    Other steps may be between the first and the last one.
    """
    if len(steps) <= most:
        return ", ".join(quoted_name(step.key) for step in steps)
    at = {step.key: number for number, step in enumerate(plan)}
    ranges: list[tuple[str, str]] = []
    for step in steps:
        if ranges and at[step.key] == at[ranges[-1][1]] + 1:
            ranges[-1] = (ranges[-1][0], step.key)
        else:
            ranges.append((step.key, step.key))
    if len(ranges) <= max(1, most):
        return ", ".join(_range(*one) for one in ranges)
    return f"among {_range(steps[0].key, steps[-1].key)}"


def _few(texts: Sequence[str], most: int) -> str:
    """Return the first texts and the number of the others; nothing if none is wanted."""
    return listed(texts, most) if most else ""


def _word(text: str) -> str:
    """Return the first words of a text."""
    return quoted_name(text, 40, brief=True)


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
