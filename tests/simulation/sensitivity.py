"""`python -m tests.simulation.sensitivity`: which defects the simulation finds, and with which seed.

A defect is put back into a script, or a line of a script or of the worker is left out. Each is played in a process of
its own, seed by seed, until a check reports something.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib.machinery
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import CodeType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .world import World

ROOT: Final = Path(__file__).parents[2]

DEFECTS: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "entries after a gap are stored": (
        ("return last < tonumber(number) and -1 - last", "return false"),
        ("if last < number - 1 then\n  return -1 - last\nend", ""),
    ),
    "an entry that is stored is applied again": (("if number <= last then\n    kind = 'stored'\n  end", ""),),
    "a fence without the delivery count": (
        (" and tostring(pending[4]) == ARGV[4]\nend\n\nlocal function settled", "\nend\n\nlocal function settled"),
    ),
    "a fence without the worker": (
        ("return pending and pending[2] == ARGV[2] and tostring", "return pending and tostring"),
    ),
    "a release lowers the delivery count": (
        ("'IDLE', ARGV[7], 'JUSTID'", "'IDLE', ARGV[7], 'RETRYCOUNT', ARGV[4] - 1, 'JUSTID'"),
    ),
    "a settled delivery is forgotten": (("return last[1] == fence_text() and last[2] == ARGV[2]", "return false"),),
    "leases are not restarted": (("if not last or math.abs(now - last) > lease / 2 then\n    start = '-'\n  end", ""),),
    "claims while leases are left to restart": (("if restarting then", "if false then"),),
    "a worker claims what it runs": (("if page[at][2] == ARGV[2] and not unknown[entry] then", "if false then"),),
}
"""Defects that earlier versions of the scripts had, each as parts of scripts and what they were."""

_SCRIPTS: Final = (
    *("fence", "finish", "reschedule", "park", "release", "claim", "write_checkpoint", "promote", "enqueue", "seen"),
    *(
        "schedule",
        "send_message",
        "enqueue_successor",
        "confirm_successor",
        "raise_count",
        "renew_leases",
        "quarantine",
    ),
)
_MODULES: Final = (
    *(f"queues/delivery/{name}.py" for name in ("consumer", "heartbeat", "leases", "quarantine_store", "settlement")),
    *("queues/delivery/due_set.py", "queues/transport/pipelining.py", "queues/transport/blocking.py"),
    *(f"worker/runtime/{name}.py" for name in ("executor", "intake", "reclaim", "settler", "slots", "quarantine_gate")),
    *("worker/durable/checkpoint_writer.py", "worker/durable/run.py", "worker/durable/recall.py"),
)
_QUIET: Final = ("PUBLISH", "EXPIRE")
_PATIENCE: Final = 120
"""Seconds of this machine after which one run counts as endless."""


def replacement(*parts: tuple[str, str]) -> Callable[[bytes], bytes]:
    """Return a change of scripts that replaces parts of them."""

    def alter(source: bytes) -> bytes:
        for old, new in parts:
            source = source.replace(old.encode(), new.encode())
        return source

    return alter


def script_lines() -> list[str]:
    """Return the lines of scripts that may be left out, as `PATH:NUMBER`."""
    found = []
    for name in _SCRIPTS:
        path = ROOT / "queues" / "lua" / f"{name}.lua"
        for number, line in enumerate(path.read_text().split("\n"), 1):
            text = line.strip()
            whole = text.count("(") == text.count(")") and not any(word in text for word in _QUIET)
            if whole and text.startswith(("redis.call(", "close(", "keep_payload(", "begin_outcome(", "put_off(")):
                found.append(f"queues/lua/{name}.lua:{number}")
    return sorted({*found})


def module_lines() -> list[str]:
    """Return the statements of the worker that may be left out, as `PATH:NUMBER`."""
    found = []
    for name in _MODULES:
        text = (ROOT / name).read_text()
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and function.name != "__init__":
                found += [
                    f"{name}:{one.lineno}" for one in ast.walk(function) if isinstance(one, ast.stmt) and _is_act(one)
                ]
    return sorted({*found}, key=lambda place: (place.split(":")[0], int(place.split(":")[1])))


def _is_act(node: ast.stmt) -> bool:
    """Return whether a node is a statement of one line that does something, other than logging."""
    if not isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise)) or node.lineno != node.end_lineno:
        return False
    text = ast.unparse(node)
    if any(word in text for word in ("logger", "bound.", "log_wait")):
        return False
    match node:
        case ast.Expr(value=value):
            return isinstance(value, (ast.Call, ast.Await))
        case ast.Assign(targets=[target]):
            return isinstance(target, (ast.Attribute, ast.Subscript))
    return True


def _line(place: str) -> str:
    path, _, number = place.partition(":")
    return (ROOT / path).read_text().split("\n")[int(number) - 1]


def leave_out(place: str) -> Callable[[bytes], bytes]:
    """Leave out a line: return the change of scripts, or change a module before it is imported."""
    path, _, number = place.partition(":")
    line = _line(place)
    if path.endswith(".lua"):
        return replacement((f"\n{line}\n", "\n"))
    get_code = importlib.machinery.SourceFileLoader.get_code

    def changed(loader: Any, name: str) -> CodeType | None:
        if Path(loader.path).resolve() != ROOT / path:
            return get_code(loader, name)
        lines = Path(loader.path).read_text().split("\n")
        lines[int(number) - 1] = " " * (len(line) - len(line.lstrip())) + "pass"
        return compile("\n".join(lines), loader.path, "exec")

    # the process ends after this run, so the loader is not restored
    importlib.machinery.SourceFileLoader.get_code = changed  # type: ignore[method-assign, assignment]
    return replacement()


def find(defect: str, seeds: int) -> str:
    """Play seeds with a defect, or without a line. Return what was found first."""
    alter = replacement(*DEFECTS[defect]) if defect in DEFECTS else leave_out(defect)
    from .plan import draw  # here: a module may have been changed, which must not be imported before
    from .world import World

    kept: list[World] = []
    gc.disable()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for seed in range(seeds):
        world = World(draw(seed))
        world.server.alter = alter
        kept.append(world)  # see __main__
        signal.alarm(_PATIENCE)
        try:
            violations = world.play().violations
        except Exception as error:  # noqa: BLE001 - whatever it is, the defect was seen
            return f"seed {seed}: {error!r}"
        if violations:
            return f"seed {seed}: {violations[0].kind}"
    return f"not found in {seeds} seeds"


def _rows(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield each defect, and what is shown of it."""
    if options.lines == 0 or options.defects:
        yield from ((name, name) for name in DEFECTS)
    random = Random(options.draw)
    for places in (script_lines(), module_lines()):
        for place in random.sample(places, options.lines // 2):
            yield place, f"`{place}`: `{_line(place).strip()}`"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.sensitivity", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="runs of each defect (100)")
    parser.add_argument("--lines", type=int, default=0, help="number of lines that are left out, one at a time")
    parser.add_argument("--draw", type=int, default=1, help="which lines")
    parser.add_argument("--defects", action="store_true", help="with --lines: the defects that were put back as well")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        sys.stdout.write(find(options.one, options.seeds))
        return 0
    for defect, shown in _rows(options):
        command = [sys.executable, "-m", "tests.simulation.sensitivity", "--one", defect, "--seeds", str(options.seeds)]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        found = run.stdout or ("a run does not end" if run.returncode == -signal.SIGALRM else run.stderr[-200:])
        sys.stdout.write(f"| {shown} | {found} |\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
