"""`perdure task correct`: other values for fields of an agent's state, from a person."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ....queues.errors import CannotResolve, PayloadTooLarge
from ....queues.producer import Producer
from ....queues.records import State
from ...agents.coherence.findings import stored_findings
from ...agents.journal.compaction import compact_state
from ...agents.journal.history import CannotCorrect, NoStateToCorrect, preview_correction
from ..support.connection import TaskOptions, connected_as_tenant
from ..support.errors import Failed, Misuse, misuse_of
from ..support.options import By, login, read_json
from ..support.output import table
from ..support.runner import Output

Fields = Annotated[
    list[str] | None,
    typer.Option("--field", metavar="PATH=VALUE", help="New value of a field, as JSON, else as text; repeatable."),
]


@connected_as_tenant
async def correct(
    producer: Producer,
    task: TaskOptions,
    *,
    field: Fields = None,
    proceed: Annotated[
        bool, typer.Option("--continue", help="Confirm that the agent may continue, also without --field.")
    ] = False,
    by: By = None,
) -> Output:
    """Correct the state of an agent, and print the task's id.

    The agent applies all values, or none, before its next step. The event
    'corrected' or 'correction_refused' says which; 'perdure task events ID'
    prints it. An agent that waits for a message wakes up; a dead letter
    applies the values after a replay, and does not ask whether it may continue.
    An agent that waits for a confirmation (on_resume="ask") continues. PATH has dots between names and
    indexes; for a name with a dot write a JSON pointer: /context/a.b

    Example: perdure task correct 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f --field context.city=Paris
    """
    if not field and not proceed:
        raise Misuse("give at least one --field PATH=VALUE, or --continue")
    changes = read_fields(field)
    handle = await task.find(producer)
    try:
        await preview_correction(producer.gateway, handle, changes)
    except NoStateToCorrect as error:
        raise Failed(str(error)) from None
    except CannotCorrect as error:
        raise Misuse(f"--field: {error}") from None
    by = login() if by is None else by
    sent = await handle.correct(changes, by=by, confirm=proceed)
    when = "the agent reads it before its next step"
    if sent.state is State.DEAD:
        when = f"it is {after_replay(sent.task_id)}"
    return Output(
        {"id": sent.task_id, "number": sent.number, "state": sent.state, "changes": changes},
        sent.task_id,
        notes=[f"sent {'correction' if changes else 'confirmation'} {sent.number} to task {sent.task_id}; {when}"],
    )


def after_replay(task_id: str) -> str:
    return f"a dead letter; to resume it: perdure dlq replay {task_id}"


def read_fields(given: list[str] | None) -> dict[str, Any]:
    """Return the values of --field by path. Raises `Misuse`."""
    return dict(map(_field, given or ()))


def _field(text: str) -> tuple[str, Any]:
    path, equals, value = text.partition("=")
    if not path or not equals:
        raise Misuse(f"--field must be PATH=VALUE, got {text!r}")
    try:
        return path, read_json(value)
    except ValueError:
        return path, value


@connected_as_tenant
async def compact(
    producer: Producer,
    task: TaskOptions,
    *,
    keep_steps: Annotated[
        int, typer.Option("--keep-steps", min=0, metavar="N", help="Closed steps that stay, with their results.")
    ] = 10,
    keep_messages: Annotated[
        int, typer.Option("--keep-messages", min=0, metavar="N", help="Messages of the conversation that stay.")
    ] = 50,
    drop_context: Annotated[
        list[str] | None,
        typer.Option("--drop-context", metavar="KEY", help="Delete this key of the state's context; repeatable."),
    ] = None,
) -> Output:
    """Move closed steps and old messages out of the state of an agent.

    Use it if an agent waits for a compaction, because its state exceeds
    PERDURE_PAYLOAD_LIMIT: it resumes. A dead letter with StateTooLarge can be
    replayed afterwards. Nothing is lost: the event log keeps it all, and
    'perdure task events ID' shows it. If a field of your own is what is too
    large, raise PERDURE_PAYLOAD_LIMIT of the workers, then run this command.

    Example: perdure task compact 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f --keep-steps 20
    """
    handle = await task.find(producer)
    try:
        found = await compact_state(
            producer.gateway,
            handle.partition,
            handle.id,
            keep_steps=keep_steps,
            keep_messages=keep_messages,
            drop_context=tuple(dict.fromkeys(drop_context or ())),
            payload_limit=producer.payload_limit,
        )
    except KeyError as error:
        raise Misuse(f"--drop-context: the state has no context key {error.args[0]!r}") from None
    before, after = sum(found.before.values()), sum(found.after.values())
    changed = sorted(found.before, key=lambda name: -found.before[name])
    rows = [
        (name, f"{found.before[name]:,}", f"{found.after[name]:,}")
        for name in changed
        if found.before[name] != found.after[name] or name in changed[:3]
    ]
    next_run, failure = None, None
    if found.woken:
        next_run = "the task is due now"
    elif found.state is State.DEAD:
        next_run = f"it is {after_replay(handle.id)}"
    elif before == after:
        failure = Failed("nothing left the state")
    return Output(
        {
            "id": handle.id,
            "before": before,
            "after": after,
            "fields": found.after,
            "steps": found.steps,
            "messages": found.messages,
            "woken": found.woken,
        },
        table(("field", "before#", "after#"), [*rows, ("all", f"{before:,}", f"{after:,}")]),
        notes=[f"archived {found.steps} steps and {found.messages} messages of task {handle.id}", next_run],
        failure=failure,
    )


@connected_as_tenant
async def dismiss(
    producer: Producer,
    task: TaskOptions,
    finding: Annotated[str, typer.Argument(metavar="FINDING", help="Number of its event, or name of its check.")],
) -> Output:
    """Dismiss a finding of a coherence check, and print the task's id.

    Use it for a false alarm: equal findings of this task do not return.
    'perdure task show' lists the findings that hold, with the numbers of
    their events. A parked task then needs a message, a dead letter a replay.

    Example: perdure task dismiss 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f 12
    """
    handle = await task.find(producer)
    if finding.isdecimal():
        numbers = [int(finding)]
    else:
        held = await stored_findings(producer.gateway, handle.partition, handle.id)
        numbers = [one.n for one in held if one.check == finding]
    if not numbers:
        lists = f"'perdure task show {handle.id}' lists them"
        raise Failed(f"could not dismiss {finding!r}: no such finding holds; {lists}")
    for number in numbers:
        try:
            await handle.dismiss(number)
        except ValueError as error:
            raise Failed(str(error)) from None
    data = {"id": handle.id, "dismissed": numbers}
    return Output(data, handle.id, notes=[f"dismissed {len(numbers)} findings of task {handle.id}"])


@connected_as_tenant
async def resolve(
    producer: Producer,
    task: TaskOptions,
    step: Annotated[str, typer.Argument(metavar="STEP", help="Key of the step, as the error names it.")],
    *,
    result: Annotated[
        str | None, typer.Option("--result", metavar="JSON", help="It happened: the step returns this value.")
    ] = None,
    failed: Annotated[
        str | None, typer.Option("--failed", metavar="TEXT", help="It failed: the step raises StepResolvedAsFailed.")
    ] = None,
    run_again: Annotated[bool, typer.Option("--run-again", help="It did not happen: call the step again.")] = False,
    by: By = None,
) -> Output:
    """Decide about a risky step in doubt, and print the task's id.

    A risky step that was cut off may have acted. Find out whether it did,
    with its idempotency key ('perdure task show ID' has it), and give one of
    --result, --failed and --run-again. The next run takes the decision in
    place of calling the step. A later decision replaces this one until a run
    has read it. The task must not run; a dead letter then needs a replay.

    Example: perdure task resolve 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f pay --result '"receipt 17"'
    """
    if (result is not None) + (failed is not None) + run_again != 1:
        raise Misuse("give one of --result JSON, --failed TEXT and --run-again")
    if failed == "":
        raise Misuse("--failed must be a text, got ''")
    decision: dict[str, Any] = {"run_again": True} if run_again else {"failed": failed}
    if result is not None:
        with misuse_of("--result"):
            decision = {"result": read_json(result)}
    handle = await task.find(producer)
    try:
        state = await handle.resolve_step(step, **decision, by=login() if by is None else by)
    except (CannotResolve, PayloadTooLarge) as error:
        raise Failed(str(error)) from None
    effect = f"it is {after_replay(handle.id)}" if state is State.DEAD else "its next run reads the decision"
    return Output(
        {"id": handle.id, "step": step, "decision": next(iter(decision)), "state": state},
        handle.id,
        notes=[f"resolved step {step!r} of task {handle.id}; {effect}"],
    )
