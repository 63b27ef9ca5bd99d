"""LangGraph's own tests, from the source distributions of the installed releases, with our saver and store."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
LEFT_OUT = {
    "langgraph": {},
    "langgraph-checkpoint": {
        "test_store.py::test_cannot_put_empty_namespace": "calls synchronous methods on the event loop",
        "test_store.py::test_async_batch_store_deduplication": "counts calls of the synchronous batch()",
    },
    "langgraph-checkpoint-sqlite": {
        "test_store.py::test_vector_store_initialization": "reads tables of SQLite",
        "test_store.py::test_nonnull_migrations": "reads migrations of SQLite",
        "test_store.py::test_embed_with_path": "names the fields as only SQLite does",
        "test_store.py::test_sql_injection_vulnerability": "expects that SQLite refuses names of fields",
        "test_store.py::test_filter_keys_with_hyphens_and_digits": "filters by paths, as only SQLite does",
        "test_store.py::test_namespace_labels_with_trailing_newline": "has labels with control characters",
        "test_get_delta_channel_history.py::test_seed_present_when_snapshot_in_ancestor_sync": "puts a value without "
        "its version, which SQLite keeps in the checkpoint",
        "test_delta_parent_walk.py::test_walk_step_looks_up_the_parent_by_primary_key": "reads plans of SQLite",
    },
}
"""Tests that are not run, and why."""

LEAST = {"langgraph": 640, "langgraph-checkpoint": 110, "langgraph-checkpoint-sqlite": 105}
"""Tests that pass in the oldest releases that are supported, at least."""


def sources() -> dict[str, Path]:
    """Return the folders of the source distributions, by package."""
    pairs = os.environ["PERDURE_ADAPTER_SOURCES"].split(os.pathsep)
    return {name: Path(path) for name, _, path in (pair.partition("=") for pair in pairs)}


def run_tests(package: str, folder: Path, files: list[str], *arguments: str) -> None:
    """Run files of the tests of a source distribution, all of which must pass, and print how many did."""
    left_out = [option for name in LEFT_OUT[package] for option in ("--deselect", f"tests/{name}")]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *arguments, *left_out]
    done = subprocess.run(
        [*command, *(f"tests/{name}" for name in files)],
        cwd=folder,
        env={**os.environ, "NO_DOCKER": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    summary = done.stdout.rstrip().rpartition("\n")[2]
    print(f"{package}: {summary}")
    found = re.search(r"(\d+) passed", summary)
    assert found is not None
    assert int(found[1]) >= LEAST[package], summary


def copied(package: str, folder: Path) -> Path:
    """Return a copy of the tests of a source distribution; its package is the installed one."""
    target = folder / package
    shutil.copytree(sources()[package], target, ignore=shutil.ignore_patterns("langgraph", "*.lock"))
    return target


@pytest.mark.timeout(600)
def test_engine(perdure: Any, tmp_path: Path) -> None:
    """All tests of the engine that have a saver as a parameter, synchronous and asynchronous."""
    folder = copied("langgraph", tmp_path)
    shutil.copy(HERE / "upstream_savers.py", folder / "tests")
    with (folder / "tests" / "conftest.py").open("a") as conftest:
        conftest.write("\n\nfrom tests.upstream_savers import async_checkpointer, sync_checkpointer\n")
    files = sorted(
        path.name
        for path in (folder / "tests").glob("test_*.py")
        if re.search(r"\b(a?sync)_checkpointer\b", path.read_text())
    )
    run_tests("langgraph", folder, files, "-k", "perdure")


def test_store_of_the_checkpoint_package(perdure: Any, tmp_path: Path) -> None:
    """Its tests of `InMemoryStore`, synchronous and asynchronous, with search by meaning."""
    folder = copied("langgraph-checkpoint", tmp_path)
    shutil.copy(HERE / "upstream_bindings.py", folder / "tests" / "conftest.py")
    run_tests("langgraph-checkpoint", folder, ["test_store.py"])


def test_store_and_delta_channels_of_the_sqlite_package(perdure: Any, tmp_path: Path) -> None:
    """Its tests of a store, and of channels that only writes tell."""
    folder = copied("langgraph-checkpoint-sqlite", tmp_path)
    shutil.copy(HERE / "upstream_bindings.py", folder / "tests" / "conftest.py")
    files = ["test_store.py", "test_get_delta_channel_history.py", "test_delta_parent_walk.py"]
    run_tests("langgraph-checkpoint-sqlite", folder, [*files, "test_delta_channel_migration.py"])
