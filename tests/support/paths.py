"""Folders of the repository that tests use."""

from __future__ import annotations

from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).resolve().parents[1]
ROOT: Final = TESTS.parent
PROGRAMS: Final = TESTS / "support" / "programs"
