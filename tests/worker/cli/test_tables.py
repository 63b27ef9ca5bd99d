"""Lists fit 80 columns: what is cut, what is folded, and what `--wide` adds."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

import pytest
from perdure.queues import QueueStats, Record, State, WorkerInfo
from perdure.worker.cli.queue import QUEUE_COLUMNS
from perdure.worker.cli.support.output import Column, R, list_table
from perdure.worker.cli.task.listing import TASK_COLUMNS
from perdure.worker.cli.worker import WORKER_COLUMNS
from rich.cells import cell_len
from rich.console import Console

NOW = 1_764_000_000_000
ID = "01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f"
RECORD = Record(
    id=ID,
    queue="reports",
    partition=0,
    state=State.SUCCEEDED,
    task="audit",
    args=b"{}",
    headers={},
    attempts=1,
    crashes=0,
    replays=0,
    enqueued_at=NOW - 3 * 60_000,
    due_at=None,
    finished_at=None,
    ran_ms=None,
    worker=None,
    step=None,
    alive_at=None,
    result=None,
    reason=None,
    error=None,
)
DEAD = replace(
    RECORD, state=State.DEAD, reason="attempts_exhausted", task="generate_the_quarterly_report_of_a_customer"
)
QUEUE = QueueStats("q" * 64, 1_234_567, 12_345, 999, 1_234, 345_600.0, {}, rate=1_234.5, workers=120)
WORKER = WorkerInfo(
    id="reports-worker-7f9c6d5b4d-x2x9z-4711-1f2e3d",
    app="reports",
    host="reports-worker-7f9c6d5b4d-x2x9z",
    pid=4711,
    version="0.1.0",
    queues=("reports", "invoices", "mail"),
    concurrency=128,
    in_flight=100,
    started=NOW - 86_400_000,
    health={"levels": [{"name": "consuming", "ok": False}, {"name": "progressing", "ok": False}]},
)


def lines(columns: Sequence[Column[R]], rows: Sequence[R], *, width: int = 80, wide: bool = False) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, markup=False, highlight=False, emoji=False)
    console.print(list_table(columns, rows, width=width, wide=wide, now=NOW))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_tasks_have_a_line_each_in_80_columns() -> None:
    shown = lines(TASK_COLUMNS, [RECORD, DEAD])
    assert len(shown) == 4
    assert max(map(cell_len, shown)) <= 80
    assert shown[0].split() == ["id", "task", "state", "enqueued", "detail"]
    assert shown[2].split() == [ID, "audit", "succeeded", "3", "min", "ago"]
    assert shown[3].startswith(f"{ID}  generate")
    assert "…" in shown[3]


@pytest.mark.parametrize(
    "record",
    [
        replace(DEAD, id="x" * 128),
        replace(DEAD, task="報告書を作成する処理" * 3, reason="理由" * 20),
        replace(DEAD, task="line\nbreak\tand\x1b[31m colour"),
        replace(RECORD, enqueued_at=NOW + 59 * 60_000, state=State.SCHEDULED, step="a step with a long name"),
    ],
    ids=["long id", "wide characters", "control characters", "in the future"],
)
def test_no_line_of_a_task_is_longer_than_80_cells(record: Record) -> None:
    shown = lines(TASK_COLUMNS, [RECORD, record])
    assert max(map(cell_len, shown)) <= 80
    assert not any("\x1b" in line for line in shown)
    first = [line.split("  ")[0] for line in shown[3:]]
    assert "".join(first).strip() == record.id, "an id can be copied in full"


def test_wide_adds_columns_and_cuts_nothing() -> None:
    narrow, wide = (lines(TASK_COLUMNS, [DEAD], width=200, wide=wide) for wide in (False, True))
    assert "attempts" not in narrow[0]
    assert {"queue", "attempts", "crashes", "worker"} <= set(wide[0].split())
    assert DEAD.task is not None
    assert DEAD.task in wide[2]


def test_a_wide_list_that_does_not_fit_has_a_line_for_each_value() -> None:
    shown = lines(TASK_COLUMNS, [DEAD, RECORD], wide=True)
    assert shown[0].split() == ["id", ID]
    assert ["task", DEAD.task] in [line.split() for line in shown]
    assert ["queue", "reports"] in [line.split() for line in shown]


def test_queues_and_workers_fit_80_columns() -> None:
    queues = lines(QUEUE_COLUMNS, [QUEUE, replace(QUEUE, queue="mail")])
    workers = lines(WORKER_COLUMNS, [WORKER])
    assert max(map(cell_len, queues + workers)) <= 80
    assert (len(queues), len(workers)) == (4, 3)
    assert "100/128" in workers[2]


def test_a_terminal_that_is_too_narrow_gets_a_line_for_each_value() -> None:
    shown = lines(TASK_COLUMNS, [RECORD], width=60)
    assert shown[:2] == [f"id        {ID}", "task      audit"]
