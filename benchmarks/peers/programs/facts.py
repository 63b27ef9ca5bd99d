"""`python -m programs.facts MODULE DISTRIBUTION...`: report versions and the default recovery timeout."""

from __future__ import annotations

import importlib
import platform
import sqlite3
import sys
from contextlib import closing
from importlib.metadata import version

from .harness import report

SQLITE = "SQLite"
"""Not a distribution but part of Python. Its default `synchronous` is reported; 2 (FULL) is an fsync per commit."""


def _version(name: str) -> str:
    if name != SQLITE:
        return version(name)
    with closing(sqlite3.connect(":memory:")) as database:
        (synchronous,) = database.execute("PRAGMA synchronous").fetchone()
    return f"{sqlite3.sqlite_version} (synchronous = {synchronous})"


if __name__ == "__main__":
    found = importlib.import_module(f".frameworks.{sys.argv[1]}", __package__)
    seconds, where = found.recovery() if hasattr(found, "recovery") else (None, "")
    report(
        python=platform.python_version(),
        versions={name: _version(name) for name in sys.argv[2:]},
        recovery={"seconds": seconds, "where": where},
    )
