"""The benchmark of the store of memories runs to its end. Nothing here asks how large a figure is."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memories import measure


@pytest.mark.parametrize("vectors", [True, False])
async def test_a_search_and_an_addition_are_measured(tmp_path: Path, vectors: bool) -> None:
    search, add = await measure(tmp_path, 20, 3, vectors=vectors)

    assert search > 0
    assert add > 0
