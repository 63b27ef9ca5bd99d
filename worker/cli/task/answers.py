"""`perdure task answer` and `perdure task waiting`: what tasks wait for, and the answers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import orjson
import typer

from ....queues.keys import check_name
from ....queues.producer import Producer
from ....queues.records import State
from ....queues.waits import Answer, OpenWait, Waits, is_wait_id, list_waiting, read_live_waits
from ....queues.wording import short
from ..support.connection import TaskOptions, connected_as_tenant, known_partitions
from ..support.errors import Misuse, misuse_of
from ..support.options import QueueOption, login, read_json
from ..support.output import Column, Time
from ..support.runner import Listing, Output


@connected_as_tenant
async def answer(
    producer: Producer,
    task: TaskOptions,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the wait, or its id such as approval#2.")],
    value: Annotated[str, typer.Argument(metavar="JSON", help="The answer; - for stdin.")],
    *,
    by: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the sender. Default: that of the approver's key, else your login."),
    ] = None,
    approver_key: Annotated[
        Path | None,
        typer.Option(
            "--approver-key",
            metavar="FILE",
            help="Private key that signs the answer. Default: that of PERDURE_APPROVER_KEY_FILE.",
        ),
    ] = None,
    answer_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="Id of the answer. A second answer with this id is ignored."),
    ] = None,
    shows: Annotated[
        str | None,
        typer.Option(
            metavar="DIGEST", help="Key 'shows' of 'task waiting --json': refuse if it shows something else now."
        ),
    ] = None,
) -> Output:
    """Answer a question of a task, and print the id of the task that has the answer.

    By name, the open wait of that name gets it. If the task has not asked
    yet, it is kept for the first wait of that name. A late or second answer
    is refused. 'perdure task waiting ID' lists the questions. Where workers
    know approvers, one of them must sign the answer.

    Example: perdure task answer 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f approval true
    """
    with misuse_of("JSON"):
        content = read_json(sys.stdin.read() if value == "-" else value)
    if not is_wait_id(name):
        with misuse_of("NAME"):
            check_name("name of a wait", name)
    own = None if producer.gateway.answer_keys is None else producer.gateway.answer_keys.own
    if approver_key is not None:
        from ....queues.security.approvers import ApproverKey

        own = ApproverKey.read(approver_key)
    if own is not None and by not in (None, own.name):
        raise Misuse(f"--by must be left out: the answer is signed as {own.name!r}, got {by!r}")
    sender = own.name if own is not None else login() if by is None else by
    handle = await task.find(producer)
    sent = await handle.answer(name, content, by=sender, answer_id=answer_id, shows=shows, approver=own)
    note = f"answered {sent.wait!r} of task {sent.task_id} as {sender!r}"
    if sent.early:
        note = f"kept the answer of {sender!r} for the first wait {sent.wait!r} of task {sent.task_id}"
    elif sent.state is State.DEAD:
        note += "; it is a dead letter and reads the answer after a replay"
    fields = {"id": sent.task_id, "wait": sent.wait, "state": sent.state, "early": sent.early}
    return Output(fields, sent.task_id, notes=[note])


class _Row(NamedTuple):
    """A line of the list: an open wait of a task, or an answer that came early."""

    task_id: str
    queue: str
    wait: OpenWait | None
    name: str = ""
    answer: Answer | None = None

    def summary(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"id": self.task_id, "queue": self.queue}
        if self.wait is not None:
            return shown | self.wait.summary()
        early = self.answer
        fields = {} if early is None else {"by": early.by, "at": early.at, "value": early.value}
        return shown | {"name": self.name, "early": True} | fields


@connected_as_tenant
async def waiting(
    producer: Producer,
    task_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Only this task, with its early answers.")
    ] = None,
    *,
    queue: QueueOption = None,
) -> Listing:
    """List the questions that tasks wait for: open waits for answers.

    With ID: those of one task, and the answers that came before their
    question. With --json: one object per line, with the JSON schema of the
    answer and what was shown.

    Example: perdure task waiting --queue mail
    """
    rows: list[_Row] = []
    if task_id is not None:
        partition = (await TaskOptions(task_id, queue).find(producer)).partition
        rows += _rows(task_id, partition.queue, await read_live_waits(producer.gateway, partition, task_id))
        empty = f"task {task_id} waits for no answer"
    else:
        partitions = await known_partitions(producer, queue)
        async for found in list_waiting(producer.gateway, partitions, tenant=producer.namespace.tenant):
            rows += _rows(found.task_id, found.partition.queue, Waits(found.waits.open, {}))
        rows.sort(key=lambda row: 0 if row.wait is None else row.wait.opened)
        empty = "no task waits for an answer"
    return Listing(_COLUMNS, rows, empty=empty, lines=True)


def _rows(task_id: str, queue: str, waits: Waits) -> list[_Row]:
    early = [_Row(task_id, queue, None, name, answer) for name, answer in sorted(waits.early.items())]
    return [_Row(task_id, queue, wait) for wait in waits.open] + early


def _why(row: _Row) -> str:
    if row.wait is None:
        value = orjson.dumps(None if row.answer is None else row.answer.value).decode()
        return f"early answer: {short(value)}"
    wait = row.wait
    if wait.problem is not None:
        return f"({wait.problem})"
    return f"(answered) {wait.why}" if wait.answered else wait.why or "-"


def _since(row: _Row) -> Time | str:
    at = row.wait.opened if row.wait is not None else 0 if row.answer is None else row.answer.at
    return Time(at)


_COLUMNS: Final[Sequence[Column[_Row]]] = (
    Column("id", lambda row: row.task_id),
    Column("wait", lambda row: row.name if row.wait is None else row.wait.id),
    Column("who", lambda row: (row.answer.by if row.answer else "-") if row.wait is None else row.wait.who or "-"),
    Column("since", _since),
    Column("until", lambda row: "-" if row.wait is None or row.wait.until is None else Time(row.wait.until)),
    Column("why", _why, least=12, fold=True),
    Column("queue", lambda row: row.queue, wide=True),
    Column("token", lambda row: "-" if row.wait is None else row.wait.token or "-", wide=True),
)
