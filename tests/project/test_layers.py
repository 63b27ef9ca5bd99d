"""Layer rules that import-linter does not check: no import hides from it, and modules do not import each other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final

import pytest

from tests.support.paths import ROOT

PACKAGE: Final = ("queues", "deadletter", "worker")
EXEMPT: Final = ("worker/cli/lazy.py",)
"""Modules that import their own package by name on purpose, as package faces do: commands are imported when called."""


def sources() -> list[Path]:
    return sorted(
        path
        for folder in PACKAGE
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "__init__.py" and str(path.relative_to(ROOT)) not in EXEMPT
    )


def hidden_imports(source: str) -> Iterator[int]:
    """Yield the lines that import a module of the package itself by its name, where import-linter cannot see it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
            name = ast.unparse(node.args[0]).lstrip("f'\"") if node.args else ""
            if name.startswith((".", "perdure")) or len(node.args) + len(node.keywords) > 1:
                yield node.lineno


def test_no_module_of_the_package_is_imported_by_its_name() -> None:
    found = {str(path.relative_to(ROOT)): [*hidden_imports(path.read_text("utf-8"))] for path in sources()}
    assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import_module('.aesgcm', __package__)", [1]),
        ("x = 1\nimportlib.import_module('perdure.queues')", [2]),
        ("import_module(f'.{name}', package=__package__)", [1]),
        ("import_module(name)", []),
        ("import_module('tiktoken')", []),
    ],
)
def test_the_check_tells_own_modules_from_others(source: str, lines: list[int]) -> None:
    assert [*hidden_imports(source)] == lines


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Imports within functions and under TYPE_CHECKING count; `prepare` raises CycleError with the circle."""
    grimp = pytest.importorskip("grimp", reason="comes with import-linter, which make test-python does not install")
    graph = grimp.build_graph("perdure", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 100
    TopologicalSorter(imports).prepare()


FACES: Final = (
    "__init__.py",
    "context.py",
    "memory.py",
    "testing.py",
    "queues/__init__.py",
    "worker/memory/__init__.py",
)
"""Modules that pass names of others on: `perdure.queues`, and the one behind `perdure.memory`."""


def test_only_the_public_modules_export_names_of_others() -> None:
    found = [
        str(path.relative_to(ROOT))
        for folder in PACKAGE
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"^__all__ = ", path.read_text("utf-8"), re.M)
    ]
    assert not set(found) - {*FACES}


def test_packages_import_nothing_for_others() -> None:
    """An import of one module loads no other module of its package, and a name has one place."""
    found = {
        str(path.relative_to(ROOT)): [name for name in imported(ast.parse(source)) if name not in used(source)]
        for folder in PACKAGE
        for path in (ROOT / folder).rglob("__init__.py")
        if str(path.relative_to(ROOT)) not in FACES
        for source in (path.read_text("utf-8"),)
    }
    assert not {name: names for name, names in found.items() if names}


def imported(tree: ast.Module) -> list[str]:
    nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
    return [alias.asname or alias.name for node in nodes for alias in node.names]


def used(source: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
