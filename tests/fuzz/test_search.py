"""The search for guilty mutations, and their seeds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from perdure.queues import Namespace, Partition
from perdure.queues.keys import SessionPartition

from tests.fuzz.mutations import draw
from tests.fuzz.places import places
from tests.fuzz.search import guilty


@pytest.mark.parametrize("wanted", [{0}, {41}, {99}, {3, 98}, {48, 49, 50}])
async def test_the_items_that_fail_together_are_found(wanted: set[int]) -> None:
    calls = 0

    async def fails(some: Sequence[int]) -> bool:
        nonlocal calls
        calls += 1
        return wanted <= set(some)

    assert set(await guilty(range(100), fails)) == wanted
    assert len(wanted) > 1 or calls < 20


def test_a_seed_and_a_number_name_a_mutation() -> None:
    kinds = list(places(Namespace("ns"), Partition("ns", "queue", 0), SessionPartition("ns", 0)))
    drawn = [draw(1, number, kinds) for number in range(5000)]
    assert drawn == [draw(1, number, kinds) for number in range(5000)]
    assert drawn[:50] != [draw(2, number, kinds) for number in range(50)]
    assert {mutation.place for mutation in drawn} == set(kinds)
