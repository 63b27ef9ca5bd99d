"""The conformance package of langgraph-checkpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from langgraph.checkpoint.conformance import checkpointer_test, validate
from perdure import App
from perdure.integrations.langgraph import PerdureSaver

CAPABILITIES = {
    "put": 17,
    "put_writes": 10,
    "get_tuple": 10,
    "list": 16,
    "delete_thread": 5,
    "delete_for_runs": 7,
    "copy_thread": 8,
    "prune": 8,
}
"""Tests of the package, base and extended, by capability; a later release may have more."""


async def test_saver_conforms(perdure: Any) -> None:
    app = App("conformance")

    @checkpointer_test(name="PerdureSaver")
    async def savers() -> AsyncIterator[PerdureSaver]:
        yield PerdureSaver(app)

    async with app:
        report = await validate(savers)
    failed = {name: found.failures for name, found in report.results.items() if not found.passed}
    assert not failed
    passed = {name: found.tests_passed for name, found in report.results.items()}
    print(passed)
    assert passed.keys() == CAPABILITIES.keys()
    assert all(passed[name] >= count for name, count in CAPABILITIES.items()), passed
