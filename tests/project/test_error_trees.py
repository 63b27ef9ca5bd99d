"""The error trees drawn at the top of the two files are the trees that the code has."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
from perdure import PerdureError
from perdure.queues import errors as queue_errors
from perdure.worker import errors as worker_errors

_LINE = re.compile(r"^([ │├└─]*)([A-Z]\w+) {2,}\S")


def drawn(module: ModuleType) -> dict[str, str]:
    """Each error of the drawing with the one it hangs on: the nearest above that begins further to the left."""
    parents: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in (module.__doc__ or "").splitlines():
        found = _LINE.match(line.replace("PerdureError", "PerdureError  ."))
        if found is not None:
            column, name = len(found[1]), found[2]
            above = [one for one in above if one[0] < column]
            if above:
                parents[name] = above[-1][1]
            above.append((column, name))
    return parents


def defined(module: ModuleType) -> dict[str, type[PerdureError]]:
    """Return the error classes that a module defines."""
    found = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    return {name: value for name, value in found.items() if isinstance(value, type) and issubclass(value, PerdureError)}


@pytest.mark.parametrize("module", [queue_errors, worker_errors])
def test_the_drawing_is_the_tree(module: ModuleType) -> None:
    classes, parents = defined(module), drawn(module)
    actual = {name: kind.__bases__[0].__name__ for name, kind in classes.items() if kind is not PerdureError}
    assert {name: parent for name, parent in parents.items() if name in classes} == actual
    assert parents.keys() - classes.keys() <= {"QueueError", "ConfigurationError"}, "drawn, but not defined"
    assert all(kind.__doc__ for kind in classes.values())
