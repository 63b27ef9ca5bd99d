"""Removal of guards: what runs without one, and which runs need which."""

from __future__ import annotations

import builtins
import importlib.machinery
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

from perdure.worker.testing.fake_engine import set_lua_function

from .guards import FUNCTION, ROOT, Guard
from .module_guards import guards_of_modules, without_guards
from .script_guards import guards_of_scripts, rewritten

__all__ = ["Survey", "parts_of", "take_out"]


def take_out(guard: Guard) -> Callable[[bytes], bytes]:
    """Take a guard out: return the change of scripts, and change its module before that is imported."""
    return _replace([guard], lambda name, found, wanted: wanted)


def _replace(guards: Sequence[Guard], function: Callable[[str, Any, bool], Any]) -> Callable[[bytes], bytes]:
    """Let a function decide what conditions are: return the change of scripts, and change modules before their import.

    The function gets the name of the guard, its condition, and what that is without the guard.
    """
    setattr(builtins, FUNCTION, function)
    set_lua_function(FUNCTION, lambda name, found, wanted: function(name.decode(), found, wanted))
    by_path: dict[str, set[str]] = {}
    for guard in guards:
        by_path.setdefault(guard.path, set()).add(str(guard))
    changes: list[tuple[bytes, bytes]] = []
    for path, names in by_path.items():
        if path.endswith(".lua"):
            text = (ROOT / path).read_text()
            changes += zip(parts_of(text), parts_of(rewritten(path, partial(_call, names))), strict=True)
    get_code = importlib.machinery.SourceFileLoader.get_code

    def changed_code(loader: Any, name: str) -> CodeType | None:
        path = Path(loader.path).resolve()
        own = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else ""
        if own not in by_path:
            return get_code(loader, name)
        return compile(without_guards(own, by_path[own]), loader.path, "exec")

    # the process ends after these runs, so the loader is not restored
    importlib.machinery.SourceFileLoader.get_code = changed_code  # type: ignore[method-assign, assignment]

    def alter(source: bytes) -> bytes:
        for old, new in changes:
            source = source.replace(old, new)
        return source

    return alter


def parts_of(script: str) -> list[bytes]:
    """Return a script without the comment at its start, in which the scripts of later releases differ.

    One that is frequent has two parts: that before its preludes and that after them.
    """
    lines = script.split("\n")
    body = "\n".join(lines[next(at for at, line in enumerate(lines) if not line.startswith("--")) :])
    return [part.encode() for part in body.split("\n-- preludes\n")]


def _call(names: Collection[str], guard: Guard, wanted: str) -> str:
    name = str(guard)
    return f"{FUNCTION}('{name}', not not ({guard.text}), {wanted})" if name in names else guard.text


@dataclass
class Survey:
    """Seeds whose runs evaluate each guard, and those that need it.

    Attributes:
        asked: Seeds that evaluate a guard, by its name.
        needed: Seeds in which it makes a difference.
        seed: The one that is played.
    """

    asked: dict[str, list[int]] = field(default_factory=dict)
    needed: dict[str, list[int]] = field(default_factory=dict)
    seed: int = 0

    def counts(self, name: str) -> tuple[int, int]:
        """Return how many seeds evaluate a guard, and how many need it."""
        return len(self.asked.get(name, ())), len(self.needed.get(name, ()))

    def watch(self) -> Callable[[bytes], bytes]:
        """Watch all guards of this process: return the change of scripts, and change modules before their import."""
        return _replace([*guards_of_scripts(), *guards_of_modules()], self._note)

    def _note(self, name: str, found: Any, wanted: bool) -> Any:
        for seeds, counts in ((self.asked, True), (self.needed, bool(found) != wanted)):
            known = seeds.setdefault(name, [])
            if counts and (not known or known[-1] != self.seed):
                known.append(self.seed)
        return found
