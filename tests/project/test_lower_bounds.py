"""Lower bounds of dependencies: no release with a known hole is allowed where a fixed one exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Final

import pytest

PROJECT: Final = Path(__file__).parents[2] / "pyproject.toml"

FIXED: Final = {
    "cryptography": ((46, 0, 5), "CVE-2026-26007, and CVE-2024-12797 of the OpenSSL in its wheels (44.0.1)"),
    "jinja2": ((3, 1, 6), "CVE-2025-27516"),
    "orjson": ((3, 11, 6), "CVE-2025-67221"),
    "starlette": ((1, 3, 1), "CVE-2026-54283, CVE-2026-48710 (1.0.1), CVE-2025-62727 (0.49.1)"),
}
"""First release of a package without the holes that are known, and their names."""


def bounds() -> dict[str, tuple[int, ...]]:
    """Return the lower bound of each dependency that users install."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    found = [re.match(r"([\w-]+)(?:\[[\w,]+\])?>=([\d.]+)", requirement) for group in groups for requirement in group]
    assert all(found), "each dependency has a lower bound"
    return {match[1]: tuple(map(int, match[2].split("."))) for match in found if match}


@pytest.mark.parametrize("package", FIXED)
def test_no_allowed_release_has_a_known_hole(package: str) -> None:
    fixed, names = FIXED[package]
    assert bounds()[package] >= fixed, names
