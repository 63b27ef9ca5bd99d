"""The benchmark of hostile inputs runs to its end. Nothing here asks how large a figure is."""

from __future__ import annotations

from benchmarks.hostile import DATA, TEXTS, hostile


def test_each_function_is_measured_at_three_sizes() -> None:
    found = dict(hostile(100, 20))
    assert found.keys() == {*TEXTS, *DATA}
    assert {len(seconds) for seconds in found.values()} == {3}
