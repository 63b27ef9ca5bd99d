"""`python -m benchmarks.peers`: measure and store the results as JSON; `.page` writes the page from them."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..support.origin import Origin
from . import results
from .environments import install
from .lines import Measure, measures
from .measurements import Facts, facts
from .processes import Failed
from .rounds import estimate, measure
from .servers import Postgres, postgres, postgres_version, redis_version
from .setups import QUEUES, STEPS, Peer
from .sizes import FULL, QUICK, Amounts
from .sweep import Swept, sweep

_RESULTS = Path(__file__).parents[2] / "docs" / "explanation" / "benchmarks" / "results.json"
_POSTGRES_SETTINGS = ("fsync", "synchronous_commit", "wal_sync_method")


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Only check that it runs; ignore the figures.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Only the benchmark of this name; may be repeated.")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="Only Perdure and this peer; may be repeated.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Repetitions of each benchmark.")] = None,
    swept: Annotated[
        Path | None, typer.Option(help="The outcome of the sweep: read if the file exists, else written.")
    ] = None,
    output: Annotated[
        Path, typer.Option(help="The file of the results; what this run does not measure stays in it.")
    ] = _RESULTS,
    note: Annotated[str, typer.Option(help="A note on the conditions, shown beside the figures.")] = "",
) -> None:
    """Measure Perdure and its peers, each in its own virtual environment, on private servers."""
    size = QUICK if quick else FULL
    if rounds is not None:
        size = replace(size, rounds=rounds, recoveries=min(rounds, size.recoveries))
    began = time.monotonic()
    _check("only", only, [what.key for what in measures(size, {})])
    everyone = {each.key: each for each in (*QUEUES, *STEPS)}
    _check("peer", peer, list(everyone))
    chosen = [each for each in everyone.values() if not peer or each.key in peer or each.environment is None]
    options = [f"--only {key}" for key in only or ()] + [f"--peer {key}" for key in peer or ()]
    options += [f"--rounds {rounds}"] if rounds else []
    origin = Origin.now(
        " ".join(["python -m benchmarks.peers", *(["--quick"] if quick else []), *options]),
        f"Redis {redis_version()}",
        f"Postgres {postgres_version()}",
    )
    about = results.About(origin.line(), note, quick=quick)
    asked = [what for what in measures(size, {}) if not only or what.key in only]
    known = _prepared([each for each in chosen if any(each in what.peers for what in asked)])
    with ExitStack() as stack:
        database = _database(stack, asked, known)
        settings = _swept(swept, known, size, database)
        known |= {setup.key: known[setup.project] for setup in settings.best.values() if setup.project in known}
        wanted = [what for what in measures(size, settings.best) if not only or what.key in only]
        _say(
            f"about {estimate(wanted, known, size) / 60:.0f} minutes for {len(known)} setups, {len(wanted)} benchmarks"
        )
        found = measure(wanted, known, size, database, settings.rates, _say)
        if database is not None:
            about = replace(about, postgres={name: database.setting(name) for name in _POSTGRES_SETTINGS})
    data = results.as_data(about, size, wanted, known, found, settings.tried)
    if output.exists() and not quick:
        data = results.merge(results.read(output), data)
    results.write(data, output)
    _say(f"written to {output} after {(time.monotonic() - began) / 60:.1f} minutes")


def _swept(file: Path | None, known: dict[str, Facts | str], size: Amounts, database: Postgres | None) -> Swept:
    """Return the outcome of the sweep, that of the file if it exists."""
    if file is not None and file.exists():
        return Swept.of(results.read(file)["tried"])
    outcome = sweep(known, size, database, _say)
    if file is not None:
        results.write({"tried": [dict(row) for row in outcome.tried]}, file)
    return outcome


def _prepared(peers: Sequence[Peer]) -> dict[str, Facts | str]:
    """Install what is missing; return the facts of each setup, or why it cannot be measured."""
    known: dict[str, Facts | str] = {}
    failed: dict[str, str] = {}
    for environment in {peer.environment: None for peer in peers if peer.environment is not None}:
        try:
            install(environment)
        except Failed as error:
            failed[environment] = str(error)
            _say(f"{environment}: {error}")
    for peer in peers:
        if peer.environment in failed:
            known[peer.key] = failed[peer.environment]
            continue
        try:
            known[peer.key] = facts(peer)
        except Failed as error:
            known[peer.key] = str(error)
            _say(f"{peer.name}: {error}")
    return known


def _database(stack: ExitStack, wanted: Sequence[Measure], known: dict[str, Facts | str]) -> Postgres | None:
    """Start a private Postgres if a setup needs it. Without one, these setups have no figures."""
    if not any(peer.store == "postgres" and peer.key in known for what in wanted for peer in what.peers):
        return None
    try:
        return stack.enter_context(postgres())
    except Failed as error:
        _say(f"no Postgres: {error}")
        return None


def _check(kind: str, asked: Sequence[str] | None, known: Sequence[str]) -> None:
    if unknown := sorted(set(asked or ()) - set(known)):
        raise typer.BadParameter(f"--{kind} must be one of {', '.join(known)}, got {', '.join(unknown)}")


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    # As on Ctrl-C: processes that were started end on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    typer.run(main)
