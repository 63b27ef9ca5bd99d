"""Guards of the Lua scripts that the simulated workers and producers call, and what runs without one of them show."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from .guards import ROOT, Finding, Guard, Kind, numbered

__all__ = ["FINDINGS_OF_SCRIPTS", "guards_of_scripts", "rewritten"]

_SCRIPTS: Final = (
    *("fence", "seen", "claim", "raise_count", "renew_leases", "write_checkpoint"),
    *("finish", "reschedule", "park", "release", "quarantine", "take_quarantined", "clear_quarantined"),
    *("enqueue", "schedule", "promote", "enqueue_successor", "confirm_successor", "enqueue_copy"),
    *("send_message", "wake", "cancel", "retention", "due", "await_version"),
    *("waits", "answer", "forget_waits", "joins", "watched"),
    *("add_children", "enqueue_child", "confirm_launch", "watch", "notify_join", "notice_sent", "close_join"),
)
_SCRIPT_PATHS: Final = (
    *(f"queues/lua/{name}.lua" for name in _SCRIPTS),
    *(f"deadletter/lua/{name}.lua" for name in ("bury", "replay")),
)

_BRANCH: Final = re.compile(r"^( *)(if|elseif) (.*?)( then)?$")
_OPTION: Final = re.compile(
    r"(kind|name|value|step|ARGV\[\d+\]|#ARGV) [=~]= ('\w*'|\d+)( or name == '\w+')*|KEYS\[\d+\]"
)
"""Conditions that only say what the caller wants."""

_LEAVES: Final = re.compile(r" *(return|break)\b")
_WRITES: Final = re.compile(r"redis\.call\(|\b(close|keep_payload|begin_outcome|put_off|count_returned)\(")


def guards_of_scripts() -> list[Guard]:
    """Return the guards of all scripts that the simulated workers and producers call."""
    found: list[Guard] = []

    def keep(guard: Guard, wanted: str) -> str:
        found.append(guard)
        return guard.text

    for path in sorted(_SCRIPT_PATHS):
        rewritten(path, keep)
    return numbered(found)


def rewritten(path: str, replace: Callable[[Guard, str], str]) -> str:
    """Return a script with other conditions. `replace` gets each guard, and what is in its place without it."""
    lines = (ROOT / path).read_text().split("\n")
    changed, at = [], 0
    while at < len(lines):
        begin, line, at = at, lines[at], at + 1
        branch = _BRANCH.match(line)
        indent = line[: len(line) - len(line.lstrip())]
        if branch is not None:
            while not lines[at - 1].endswith(" then"):
                at += 1
            condition = " ".join(line.strip() for line in lines[begin:at])
            condition = condition.removeprefix(branch[2]).removesuffix("then").strip()
            if not _OPTION.fullmatch(condition):
                condition = replace(Guard(path, begin + 1, 0, condition), _is_taken(lines, at, indent))
            line = f"{indent}{branch[2]} {condition} then"
        elif re.match(r" *return [^{]", line) and re.search(r" (==|~=|<|>|<=|>=|and) ", line):
            operands = line.strip().removeprefix("return ").split(" and ")
            most = len(operands) - (
                len(operands) > 1 and re.search(r" or |^(?!.* (==|~=|<|>) )", operands[-1]) is not None
            )
            left = [replace(Guard(path, begin + 1, part, operands[part]), "true") for part in range(most)]
            line = f"{indent}return {' and '.join([*left, *operands[most:]])}"
        changed.append(line)
    return "\n".join(changed)


def _is_taken(lines: list[str], begin: int, indent: str) -> str:
    """Return whether a branch without its condition is taken always: not if it refuses, or writes nothing."""
    body = []
    for line in lines[begin:]:
        if line.startswith((f"{indent}else", f"{indent}end")):
            break
        body.append(line)
    leaves = any(
        _LEAVES.match(line) and line.startswith(f"{indent}  ") and line[len(indent) + 2] != " " for line in body
    )
    return "true" if not leaves and _WRITES.search("\n".join(body)) else "false"


FINDINGS_OF_SCRIPTS: Final = (
    Finding(
        "deadletter/lua/replay.lua",
        "not found",
        "the letter is still there",
        Kind.EQUIVALENT,
        "a replay deletes the letter and its field `dead` in one script, so the next condition refuses the same",
    ),
    Finding(
        "deadletter/lua/replay.lua",
        "ARGV[3] ~= '' and former",
        "arguments were edited",
        Kind.FOUND,
        "a script ends in its middle",
        18,
    ),
    Finding("deadletter/lua/replay.lua", "nameless", "the letter is no task", Kind.FOUND, "one place", 18),
    Finding(
        "queues/lua/cancel.lua",
        "born(now[1], now[2]) ~= born(ARGV[6] ~= '' and ARGV[6], ARGV[7]) or (now[3] or '') ~= ARGV[8]"
        " or (now[4] or '') ~= ARGV[9] or (now[5] or '') ~= ARGV[11]",
        "the task is the one that was read",
        Kind.OUTSIDE,
        "no id is used for two tasks, and a refused caller reads again; a conformance test does both",
    ),
    Finding(
        "queues/lua/cancel.lua",
        "pending[2] and string.sub(pending[2], 1, 1) ~= ARGV[2]",
        "a worker runs the task",
        Kind.FOUND,
        "taken from a worker that runs it",
        13,
    ),
    Finding(
        "queues/lua/claim.lua",
        "not redis.call('XPENDING', KEYS[1], group, '-', '+', 1, worker)[1]",
        "XAUTOCLAIM would take own entries",
        Kind.RARE,
        "a run of `test_defects.py` finds it",
    ),
    Finding(
        "queues/lua/claim.lua",
        "page[at][2] == worker and not unknown[entry]",
        "an own entry is left out",
        Kind.RARE,
        "a run of `test_defects.py` finds it",
    ),
    Finding(
        "queues/lua/enqueue_successor.lua", "known[1]", "the successor is stored already", Kind.FOUND, "one place", 3
    ),
    Finding("queues/lua/fence.lua", "pending", "the message is pending", Kind.FOUND, "a script ends in its middle", 8),
    Finding(
        "queues/lua/fence.lua", "redis.call('EXISTS', record) == 1", "the record exists", Kind.FOUND, "liveness", 19
    ),
    Finding(
        "queues/lua/park.lua",
        "not owned(KEYS[1])",
        "the delivery is the worker's",
        Kind.FOUND,
        "no write without the delivery",
        21,
    ),
    Finding(
        "queues/lua/release.lua",
        "count_returned(KEYS[2])",
        "the record exists",
        Kind.OUTSIDE,
        "no run releases a message without a record; a conformance test does",
    ),
    Finding(
        "queues/lua/renew_leases.lua",
        "pending and pending[2] == ARGV[2] and tostring(pending[4]) == count",
        "the delivery is the worker's",
        Kind.FOUND,
        "a hand-out raises the count",
        29,
    ),
    Finding(
        "queues/lua/reschedule.lua",
        "settled(KEYS[2])",
        "the outcome is stored",
        Kind.FOUND,
        "nothing is accepted without the delivery",
        36,
    ),
    Finding(
        "queues/lua/schedule.lua",
        "closed",
        "the partition is closed",
        Kind.RARE,
        "the one that does drains the partition all the same; a conformance test sees it",
    ),
    Finding(
        "queues/lua/seen.lua",
        "not last or math.abs(now - last) > lease / 2",
        "leases had no chance",
        Kind.FOUND,
        "no healthy worker loses a lease",
        28,
    ),
    Finding(
        "queues/lua/seen.lua",
        "start ~= ''",
        "leases are left to restart",
        Kind.EQUIVALENT,
        "Redis refuses a search from an empty id, and an error has no entries",
    ),
    Finding(
        "queues/lua/seen.lua",
        "owner ~= released",
        "the message is not released",
        Kind.FOUND,
        "no healthy worker loses a lease",
        42,
    ),
    Finding("queues/lua/send_message.lua", "task[2]", "the task has a successor", Kind.FOUND, "liveness", 39),
    Finding(
        "queues/lua/wake.lua",
        "woken and now < tonumber(first[2])",
        "the task is due before all others",
        Kind.EQUIVALENT,
        "another nudge wakes a worker, which finds nothing new",
    ),
)
