"""Turns of the lanes without Redis: which lane the next start comes from, while others wait."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from perdure.queues.delivery.lane_turns import TURN, LaneTurns

RANKS = (0, 1, 2)


def starts(turns: LaneTurns, waiting: list[int], rooms: list[int]) -> list[int]:
    """Return the lanes of starts while each lane that waits has no end, as many at a time as there is room."""
    found: list[int] = []
    for room in rooms:
        left = room
        while left:
            rank, most = turns.next(waiting)
            count = min(left, most)
            assert count > 0
            turns.started(rank, count, RANKS)
            found += [rank] * count
            left -= count
    return found


def test_of_eight_starts_in_a_row_one_goes_to_a_lane_below() -> None:
    assert starts(LaneTurns(), [0, 1], [1] * 17) == [0] * 7 + [1] + [0] * 7 + [1] + [0]


def test_a_lane_that_waits_alone_is_read_without_turns() -> None:
    turns = LaneTurns()
    assert turns.next([2])[1] > 1_000_000


def test_a_lane_without_tasks_takes_no_turn() -> None:
    turns = LaneTurns()
    assert starts(turns, [0, 2], [7]) == [0] * 7
    turns.found_empty(2)
    assert starts(turns, [0, 2], [7]) == [0] * 7


@given(st.sampled_from([[0, 1], [0, 2], [1, 2], [0, 1, 2]]), st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_no_lane_that_waits_is_passed_over_for_longer(waiting: list[int], rooms: list[int]) -> None:
    """However many slots are free at a time: the lane below gets one of `TURN` starts, the highest most of all."""
    found = starts(LaneTurns(), waiting, rooms)
    for first in range(len(found) - TURN + 1):
        assert set(found[first : first + TURN]) != {min(waiting)}
    for rank in waiting[1:]:
        since = 0
        for start in found:
            since = 0 if start == rank else since + (start < rank)
            assert since <= TURN
    counts = Counter(found)
    assert len(found) < 2 * TURN or counts[min(waiting)] >= max(counts[rank] for rank in waiting[1:])
