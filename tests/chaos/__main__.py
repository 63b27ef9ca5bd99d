"""`python -m tests.chaos [run]` plays a run and checks it; `python -m tests.chaos check DIR` checks a kept journal."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

from .checker.verdict import verdict
from .journal import read_journal
from .options import Options
from .play import play
from .schedule import WEIGHTS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    run = commands.add_parser("run", help="play a run and check it")
    run.add_argument("--seconds", type=float, default=600.0, help="seconds during which faults are injected (600)")
    run.add_argument("--seed", type=int, default=None, help="seed of the schedule; else a new one, which is printed")
    run.add_argument("--journal", type=Path, default=None, help="keep the journal in this new folder")
    run.add_argument("--workers", type=int, default=Options.workers, help="hosts with workers (%(default)s)")
    run.add_argument("--processes", type=int, default=Options.processes, help="workers per supervisor; 0: none")
    run.add_argument("--rate", type=float, default=Options.rate, help="tasks per second (%(default)s)")
    run.add_argument("--pause", type=float, default=Options.pause, help="seconds between faults (%(default)s)")
    run.add_argument("--lease", type=float, default=Options.lease, help="seconds (%(default)s)")
    run.add_argument(
        "--patience",
        type=float,
        default=Options.patience,
        help="seconds to end in (%(default)s)",
    )
    run.add_argument("--previous", default=None, help="commit whose workers take part; '' for none")
    run.add_argument("--faults", type=_faults, default=Options.faults, metavar="A,B", help="inject only these faults")
    mixes = ("all", "waits", "streams", "limits", "mixed")
    run.add_argument("--mix", choices=mixes, default=Options.mix, help="only these tasks (all)")
    run.add_argument("--spared", type=int, default=Options.spared, help="more hosts, which no fault hits (%(default)s)")
    run.add_argument("--sample", action="store_true", help="sample memory, and compare the parts of the run")
    check = commands.add_parser("check", help="check a kept journal")
    check.add_argument("journal", type=Path)
    return parser


def _faults(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - WEIGHTS.keys():
        raise argparse.ArgumentTypeError(f"unknown fault {', '.join(sorted(unknown))}; known: {', '.join(WEIGHTS)}")
    return names


def main() -> int:
    """Return the exit code: 1 if a guarantee was violated."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] not in ("run", "check", "-h", "--help"):
        arguments.insert(0, "run")
    given = vars(_parser().parse_args(arguments))
    if given.pop("command") == "check":
        return verdict(read_journal(given["journal"]), given["journal"])
    kept = given["journal"]
    folder = Path(kept or tempfile.mkdtemp(prefix="perdure-chaos-")).absolute()
    if kept is not None:
        folder.mkdir(parents=True)
    if given["seed"] is None:
        given["seed"] = secrets.randbelow(1_000_000)
    options = Options(**given | {"journal": folder})
    sys.stdout.write(f"seed {options.seed}: {options.seconds:g} s, journal in {folder}\n")
    sys.stdout.flush()
    try:
        asyncio.run(play(options))
    except (asyncio.CancelledError, KeyboardInterrupt):
        sys.stderr.write(f"a signal ended the run, and all its processes; its journal is in {folder}\n")
        return 1
    code = verdict(read_journal(folder), folder)
    if kept is None and code == 0:
        shutil.rmtree(folder)
    return code


if __name__ == "__main__":
    sys.exit(main())
