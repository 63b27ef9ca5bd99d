"""Rules: a session hears each message once, those of one sender in their order, and none is lost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from ...journal import Line
from ..history import History, Violation

__all__ = ["check_sessions"]


def check_sessions(history: History) -> Iterator[Violation]:
    """Check the state that each session has at the end of the run."""
    said: dict[str, list[Line]] = defaultdict(list)
    finals: dict[str, Line] = {}
    asked: dict[str, int] = {}
    for line in history.lines:
        if line.what == "says":
            asked[line["text"]] = line.at
        elif line.what == "said":
            said[line["session"]].append(line)
        elif line.what == "session":
            finals[line["session"]] = line
        elif line.what == "session_failed":
            yield Violation("session failed", f"session {line['session']}: {line['error']}", (line,))
    ended = any(line.what == "ends" for line in history.lines)
    for session, lines in said.items() if ended else ():
        final = finals.get(session)
        if final is None:
            if not all(history.lost(line.at, history.end) for line in lines):
                yield Violation("lost", f"session {session} has messages and does not exist", tuple(lines[:3]))
            continue
        yield from _check(history, session, lines, final, asked)


def _check(history: History, session: str, said: list[Line], final: Line, asked: dict[str, int]) -> Iterator[Violation]:
    heard: list[str] = final["heard"]
    if final["problem"] is not None or final["status"] != "idle":
        problem = final["problem"] or f"it is {final['status']} though time was given"
        yield Violation("session failed", f"session {session}: {problem}", (final,))
    for text, count in Counter(heard).items():
        if count > 1:
            lines = [line for line in said if line["text"] == text]
            yield Violation("heard twice", f"session {session} heard {text!r} {count} times", (*lines, final))
    for line in said:
        begin = asked.get(line["text"], line.at)  # the message is the first write of the call
        if line["text"] not in heard and not history.lost(line.at, history.end, asked=begin):
            yield Violation("lost", f"session {session} never heard {line['text']!r}", (line, final))
    numbers: dict[str, int] = {}
    for text in heard:
        sender, _, number = text.rpartition(":")
        if int(number) < numbers.get(sender, 0) and not _rolled_back(history, said, text):
            what = f"session {session} heard {text!r} after message {numbers[sender]} of {sender}"
            yield Violation("out of order", what, (final,))
        numbers[sender] = int(number)


def _rolled_back(history: History, said: list[Line], text: str) -> bool:
    """Return whether Redis lost data around the time of a message, so that its sender stored it again later."""
    return any(line["text"] == text and history.lost(line.at, history.end) for line in said)
