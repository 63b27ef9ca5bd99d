"""Rule: a checkpoint has no gap, whatever Redis has lost.

A run records its values in their order. So when a later run finds one of them in the record, it finds all that the
former run had been given before that step began. Nothing excuses a gap: Redis may lose the end of a record, and not a
part before its end.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...journal import Line
from ..history import History, Run, Task, Violation

__all__ = ["check_gaps"]


def check_gaps(history: History) -> Iterator[Violation]:
    """Check the rule.

    The values in the ledger of a payment are left out: a run finds them outside Redis.
    """
    for task in history.tasks.values():
        outside = set(task.ledger["tokens"]) if task.ledger is not None else set()
        makers = {line["token"]: (run, line) for run in task.runs for line in run.effects}
        for run in task.runs:
            for found in run.values:
                maker, made = makers.get(found["token"], (run, found))
                if maker is not run and found["token"] not in outside:
                    yield from _missing(task, maker, made, run, found)


def _missing(task: Task, maker: Run, made: Line, run: Run, found: Line) -> Iterator[Violation]:
    """Yield the earlier values of the maker that the run did not find."""
    began = next((line for line in maker.begins if line["token"] == made["token"]), made)
    for value in maker.values:
        again = next((line for line in run.begins if line["step"] == value["step"]), None)
        if value.at < began.at and again is not None:
            what = f"{task.id}, step {value['step']}: started again, and the later step {found['step']} was recorded"
            yield Violation("gap in a checkpoint", what, (value, maker.first, began, run.first, again, found))
