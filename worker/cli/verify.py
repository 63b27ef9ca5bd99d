"""`perdure verify`: cut off the worker of a task at each of its writes, and compare with an undisturbed run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ...queues.wording import counted
from ..testing.crashes import crash_everywhere, shown_places
from .support.app_loader import load_app
from .support.errors import Failed, Misuse, misuse_of
from .support.options import Assured, confirm_act, in_duration, read_json, read_object
from .support.output import Bar, Styled, table
from .support.runner import Output, command


@command
async def verify(
    app: Annotated[str, typer.Argument(metavar="APP", help="module:attribute or path/to/file.py:attribute.")],
    task: Annotated[str, typer.Argument(metavar="TASK", help="Name of the task or agent.")],
    *,
    args: Annotated[str | None, typer.Option(metavar="JSON", help="Arguments by name, as a JSON object.")] = None,
    answer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=JSON", help="Answer to a wait of this name. Repeatable."),
    ] = None,
    message: Annotated[
        list[str] | None, typer.Option(metavar="JSON", help="Message to the task, when it waits. Repeatable.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Most crashes, spread over the writes. Default: all.")
    ] = None,
    timeout: Annotated[float, in_duration("Time for which one worker may run.")] = 30.0,
    yes: Assured = False,
) -> Output:
    """Crash a task at each of its writes, and check that it continues as before.

    The task is run in this process on a server of its own: undisturbed, and
    then again for each write, with a worker that is cut off before it, and
    after it. Another worker continues. Results, steps and the number of their
    calls are compared. Sleeps and the delays of retries pass at once.

    The functions of the steps are called for real, once in each run: point
    them at test accounts. Needs the extra "testing".

    Exits with 1 if there are differences.

    Example: perdure verify shop:app invoice --args '{"articles": ["book"]}'
    """
    found = load_app(app)
    if task not in found.tasks:
        raise Misuse(f"app {found.name!r} has no task {task!r}; it has: {', '.join(sorted(found.tasks)) or 'none'}")
    with misuse_of("--args"):
        arguments = {} if args is None else read_object(args)
    with misuse_of("--answer"):
        answers = dict(map(_answer, answer or ()))
    with misuse_of("--message"):
        messages = [read_json(text) for text in message or ()]
    if not yes:
        confirm_act(
            f"Call the functions of the steps of {task!r} for real, many times?",
            "verify calls the functions of the steps for real, many times",
            "nothing was run",
        )
    with Bar("crashes", rest=None) as bar:

        def show(_done: int, total: int) -> None:
            bar.total = total
            bar.advance()

        try:
            report = await crash_everywhere(
                found,
                task,
                arguments,
                answers=answers,
                messages=messages,
                limit=limit,
                timeout=timeout,
                on_crash=show,
            )
        except ValueError as error:
            raise Failed(_remedy(str(error))) from error
    data: Mapping[str, Any] = {
        "task": report.task,
        "outcome": report.outcome,
        "writes": list(report.writes),
        "crashes": report.crashes,
        "problems": [problem._asdict() for problem in report.problems],
        "repeated": dict(report.repeated),
        "varying": list(report.varying),
    }
    rows = [(Styled("problem", "red"), shown_places(places), text) for text, places in report.by_text().items()]
    rows += [
        (Styled("repeated", "yellow"), name, f"in flight at {counted(count, 'crash', 'crashes')}: ran once more")
        for name, count in report.repeated.items()
    ]
    rows += [
        (Styled("varies", "cyan"), name, "differs between two undisturbed runs: not compared")
        for name in report.varying
    ]
    problems = len(report.by_text())
    return Output(
        data,
        table(("", "at", "found"), rows),
        notes=[f"{report.task}: {report.outcome}; {len(report.writes)} writes, {report.crashes} crashes"],
        failure=Failed(f"problems: {problems}") if problems else None,
    )


def _answer(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"must be NAME=JSON, got {text!r}")
    return name, read_json(value)


def _remedy(text: str) -> str:
    return text.replace("give answers=", "give --answer NAME=JSON")
