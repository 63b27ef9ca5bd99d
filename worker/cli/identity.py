"""`perdure identity`: who the agents are, apart from the state of their work."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Final

import orjson
import typer
from pydantic import ValidationError

from ...queues.producer import Producer
from ..agents.identity import Identity, IdentityVersion, identity_versions, set_identity
from ..errors import first_problem
from ..shown_text import clean_json
from .support.connection import connected
from .support.errors import Failed, Misuse
from .support.options import login, read_text
from .support.output import StderrText, table
from .support.runner import Output

app = typer.Typer(no_args_is_help=True, add_completion=False)

Agent = Annotated[str, typer.Argument(metavar="AGENT", help="Name of the agent.", show_default=False)]


@app.callback()
def identity() -> None:
    """Show and change the identity of an agent: role, policies, parameters, goals.

    It is stored apart from the state of any task, in versions, and changes only
    by 'perdure identity set'. An agent whose class has an 'identity' reads it at
    the start of each run; that of the class holds until one is stored.
    """


@app.command()
@connected
async def show(
    producer: Producer,
    agent: Agent,
    *,
    version: Annotated[int | None, typer.Option("--version", metavar="N", help="An earlier version.")] = None,
) -> Output:
    """Print the stored identity, in the form that 'set' reads.

    Example: perdure identity show assistant > identity.json
    """
    found = await identity_versions(producer.gateway, producer.namespace, agent)
    shown = next((one for one in reversed(found) if version in (None, one.version)), None)
    if shown is None:
        if found:
            raise Failed(f"agent {agent!r} has no version {version}; 'perdure identity log {agent}' lists the versions")
        hint = (await producer.catalog()).hint(agent) or f"; store one with 'perdure identity set {agent} FILE'"
        raise Failed(f"agent {agent!r} has no identity stored{hint}")
    identity = orjson.dumps(shown.identity.model_dump(mode="json"), option=orjson.OPT_INDENT_2).decode()
    return Output(_described(shown), StderrText(f"version {shown.version}{_changed(shown)}"), clean_json(identity))


@app.command("set")
@connected
async def set_(
    producer: Producer,
    agent: Agent,
    file: Annotated[str, typer.Argument(metavar="FILE", help="JSON file; - for stdin.", show_default=False)],
    *,
    why: Annotated[str, typer.Option("--why", help="Reason of the change, kept with the version.")] = "",
    by: Annotated[str, typer.Option("--by", help="Who changes it. Default: the user of this process.")] = "",
    expected: Annotated[
        int | None, typer.Option("--expect", metavar="N", help="Version that is to be changed; 0 for none.")
    ] = None,
) -> Output:
    """Store an identity as a new version.

    FILE has the fields role (text), policies (list of texts), parameters
    (object) and goals (list of texts). Tasks that run keep theirs until their
    next run. Agents whose class has no identity read none.

    Example: perdure identity set assistant identity.json --why "new refund limit"
    """
    wanted, catalog = _read(file), await producer.catalog()
    version = await set_identity(
        producer.gateway, producer.namespace, agent, wanted, expected=expected, by=by or login(), why=why
    )
    unknown = catalog.tasks and not catalog.named(agent)
    hint = f"stored, but no worker has published an agent {agent!r}{catalog.hint(agent)}" if unknown else None
    return Output({"agent": agent, "version": version}, str(version), notes=[hint])


@app.command()
@connected
async def log(producer: Producer, agent: Agent) -> Output:
    """List the versions of an identity, the newest first: when, by whom, why.

    Example: perdure identity log assistant
    """
    found = (await identity_versions(producer.gateway, producer.namespace, agent))[::-1]
    rows = [(one.version, _time(one), one.by, one.why) for one in found]
    shown = table(("version#", "changed", "by", "why"), rows)
    hint = "" if found else (await producer.catalog()).hint(agent)
    nothing = StderrText(f"agent {agent!r} has no identity stored{hint}")
    return Output([_described(one) for one in found], shown if found else nothing)


_FILE_BYTES: Final = 1 << 20


def _read(file: str) -> Identity:
    try:
        return Identity.model_validate_json(read_text(file, _FILE_BYTES))
    except ValidationError as error:
        raise Misuse(f"{file} is not an identity: {first_problem(error)}") from None


def _described(one: IdentityVersion) -> dict[str, Any]:
    return {"version": one.version, "changed": _time(one), "by": one.by, "why": one.why} | {
        "identity": one.identity.model_dump(mode="json")
    }


def _time(one: IdentityVersion) -> str:
    return "" if one.at is None else datetime.fromtimestamp(one.at / 1000, UTC).isoformat(timespec="seconds")


def _changed(one: IdentityVersion) -> str:
    who = f" by {one.by}" if one.by else ""
    why = f": {one.why}" if one.why else ""
    return f", changed {_time(one)}{who}{why}"
