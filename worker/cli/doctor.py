"""`perdure doctor`: what is wrong with a deployment, what it means, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from ..doctor.examination import examine, fix
from ..doctor.result import CheckResult, Severity
from ..settings import load_settings
from .support.app_loader import load_app
from .support.connection import ConnectionOptions
from .support.errors import Failed
from .support.output import Styled, Value, table
from .support.runner import Output, command

_STYLES: Final = {
    Severity.OK: "green",
    Severity.NOTE: "cyan",
    Severity.WARNING: "yellow",
    Severity.ERROR: "red",
}


class RoleOption(StrEnum):
    """Values of `--role`."""

    PRODUCER = "producer"
    VIEWER = "viewer"
    WORKER = "worker"
    OPERATOR = "operator"
    ALL = "perdure"


@command
async def doctor(
    apps: Annotated[
        list[str] | None,
        typer.Option("--app", metavar="APP", help="Compare an app with the workers that run. Repeatable."),
    ] = None,
    *,
    connection: ConnectionOptions,
    fix_: Annotated[bool, typer.Option("--fix", help="Make the repairs that are safe while workers run.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings too.")] = False,
    role: Annotated[
        RoleOption | None, typer.Option(help="Role whose rights the user must have. Default: any role.")
    ] = None,
    user: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Redis user whose rights are looked at. Needs an administrator."),
    ] = None,
) -> Output:
    """Examine the server, the rights and the data of a deployment.

    Prints what was found, what it means and what to do. It changes nothing,
    except with --fix: then expired registrations, consumers of workers that
    are gone and values of other programs are moved away, and lost tasks are
    put back. The exit code is 1 if there is an error, else 0.

    Example: perdure doctor --strict
    """
    loaded = [(name, load_app(name)) for name in apps or ()]
    settings = load_settings(**connection.overrides())
    producer = connection.producer()
    producer.gateway.requirements = None  # what others refuse or log is a finding here
    findings = await examine(producer, settings, role=None if role is None else role.value, user=user, apps=loaded)
    if fix_:
        findings = await fix(producer, findings)
    findings.sort(key=lambda finding: -finding.severity.rank)
    counts = Counter(finding.severity for finding in findings)
    wrong = counts[Severity.ERROR] + (counts[Severity.WARNING] if strict else 0)
    data = {
        "server": producer.address.shown,
        "namespace": producer.namespace.name,
        "counts": {severity.value: counts[severity] for severity in Severity},
        "findings": [finding.summary() for finding in findings],
    }
    summary = ", ".join(f"{severity.value} {counts[severity]}" for severity in reversed(Severity))
    return Output(
        data,
        table(("", "check", "found"), _rows(findings)),
        notes=[f"{producer.namespace.name!r} on {producer.address.shown}: {summary}"],
        failure=Failed(f"findings that need work: {wrong}") if wrong else None,
    )


def _rows(findings: Sequence[CheckResult]) -> Iterator[Sequence[Value]]:
    for finding in findings:
        where = f"{finding.where}: " if finding.where and finding.where not in finding.found else ""
        yield Styled(finding.severity.value, _STYLES[finding.severity]), finding.check, f"{where}{finding.found}"
        parts: dict[str, Any] = {"means": finding.meaning, "do": finding.remedy, "fixed": finding.done}
        for name, text in parts.items():
            if text:
                yield "", name, text
