"""Routes without Redis: unique indexes, encoding and decoding, and the distribution of keys."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perdure.queues.keys import Namespace
from perdure.queues.lanes import LANES, lane_of
from perdure.queues.partitions.assignment import READERS, assigned_partitions
from perdure.queues.partitions.route import MAX_PARTITIONS, SINGLE, Generation, Route, UnreadableRoute, spread

COUNTS = st.lists(st.integers(1, 40), max_size=6)


def route_of(counts: list[int]) -> Route:
    route = SINGLE
    for count in counts:
        route = route.changed(count)
    return route


def test_a_queue_has_one_partition_by_default() -> None:
    assert SINGLE.generations == (Generation(0, 1),)
    assert SINGLE.encode() == b"1"
    assert Route.decode(b"1") == SINGLE


def test_a_change_of_the_count_adds_a_generation() -> None:
    route = SINGLE.changed(4)
    assert route.generations == (Generation(0, 1), Generation(1, 4))
    assert list(route.indexes) == [0, 1, 2, 3, 4]
    assert list(route.last.indexes) == [1, 2, 3, 4]
    assert route.previous == (Generation(0, 1),)
    assert route.changed(4) is route


def test_the_format_of_earlier_versions_is_read() -> None:
    assert Route.decode(b"3") == Route((Generation(0, 3),))
    assert Route.decode(b"3").encode() == b"3"


@pytest.mark.parametrize("wrong", [b"", b"0", b"-1", b"x", b"[]", b"{}", b'{"generations": []}', b'{"generations": 1}'])
def test_an_invalid_route_is_refused(wrong: bytes) -> None:
    with pytest.raises(UnreadableRoute):
        Route.decode(wrong)


@pytest.mark.parametrize("count", [0, -1, MAX_PARTITIONS + 1])
def test_a_count_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="1 to 1024"):
        SINGLE.changed(count)


@given(COUNTS)
def test_indexes_are_unique_and_contiguous(counts: list[int]) -> None:
    route = route_of(counts)
    indexes = list(route.indexes)
    assert indexes == list(range(len(indexes)))
    assert route.last.count == (counts[-1] if counts else 1)
    assert Route.decode(route.encode()) == route


@given(COUNTS, st.data())
def test_every_generation_but_the_last_can_be_removed(counts: list[int], data: st.DataObject) -> None:
    route = route_of(counts)
    gone = data.draw(st.sampled_from(route.generations))
    shorter = route.without(gone)
    assert shorter.last == route.last
    assert (gone in shorter.generations) == (gone == route.last)
    assert shorter.changed(41).last.first == route.last.end
    assert Route.decode(shorter.encode()) == shorter


@given(COUNTS, st.lists(st.integers(1, 40), max_size=3))
def test_a_join_restores_lost_generations(counts: list[int], more: list[int]) -> None:
    stored, known = route_of(counts), route_of(counts + more)
    assert stored.joined(known) == known
    assert known.joined(stored) == known
    for generation in known.previous:
        assert known.without(generation).joined(known) == known.without(generation)


@given(COUNTS, COUNTS)
def test_a_join_of_conflicting_routes_keeps_all_indexes(one: list[int], other: list[int]) -> None:
    joined = route_of(one).joined(route_of(other))
    assert set(joined.indexes) == {*route_of(one).indexes, *route_of(other).indexes}


def test_a_key_has_the_same_hash_in_every_process() -> None:
    code = "from perdure.queues.partitions.route import spread; print(spread('session-7'), spread('ü'))"
    reported = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True, text=True
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert reported[0] == reported[1] == [str(spread("session-7")), str(spread("ü"))]
    assert spread("session-7") == 0x4E1B615FC715581A, "another hash would send a key elsewhere, and its order with it"


def test_keys_spread_evenly() -> None:
    generation = Generation(1, 8)
    found = Counter(generation.index_of(spread(f"session-{number}")) for number in range(8_000))
    assert set(found) == set(generation.indexes)
    assert all(850 < count < 1150 for count in found.values())


# assignment of partitions


@given(st.integers(1, 12), st.integers(1, 40))
def test_every_partition_has_the_required_number_of_readers(workers: int, count: int) -> None:
    sharers = {f"w{number}" for number in range(workers)}
    partitions = [Namespace("ns").partition("q", index) for index in range(count)]
    shares = {worker: assigned_partitions(worker, sharers, partitions) for worker in sharers}
    readers = Counter(partition for share in shares.values() for partition in share)
    assert all(readers[partition] == min(READERS, workers) for partition in partitions)


@given(st.integers(3, 12), st.integers(0, 11))
def test_a_leaving_worker_moves_only_its_partitions(workers: int, leaver: int) -> None:
    sharers = {f"w{number}" for number in range(workers)}
    gone = f"w{leaver % workers}"
    partitions = [Namespace("ns").partition("q", index) for index in range(64)]
    his = set(assigned_partitions(gone, sharers, partitions))
    for worker in sharers - {gone}:
        before, after = (set(assigned_partitions(worker, some, partitions)) for some in (sharers, sharers - {gone}))
        assert before <= after
        assert after - before <= his


# lanes


@st.composite
def routes(draw: st.DrawFn) -> Route:
    """Routes that changed and got lanes in any order."""
    route = SINGLE
    for act in draw(st.lists(st.one_of(st.integers(1, 40), st.sampled_from(LANES)), max_size=8)):
        route = route.changed(act) if isinstance(act, int) else route.with_lane(act)
    return route


def test_a_lane_has_as_many_partitions_as_the_queue_and_indexes_of_its_own() -> None:
    route = SINGLE.changed(4).with_lane("high")
    assert route.lanes == ("high", "normal")
    assert list(route.indexes) == [0, 1, 2, 3, 4, *range(1_000_000, 1_000_004)]
    assert route.of("high") == Route((Generation(1_000_000, 4),))
    assert route.of("normal") == SINGLE.changed(4)
    assert route.of("low") is None
    assert {lane_of(index) for index in route.indexes} == {"normal", "high"}


def test_a_change_of_the_count_changes_each_lane() -> None:
    route = SINGLE.with_lane("idle").changed(2)
    assert route.latest == (Generation(1, 2), Generation(3_000_001, 2))
    assert route.previous == (Generation(0, 1), Generation(3_000_000, 1))
    assert route.last == Generation(1, 2)
    assert route.without(Generation(3_000_000, 1)).of("idle") == Route((Generation(3_000_001, 2),))
    assert [index for index in route.indexes if route.takes(index)] == [1, 2, 3_000_001, 3_000_002]


def test_lanes_stand_beside_the_generations_that_earlier_versions_read() -> None:
    stored = SINGLE.with_lane("low").with_lane("high").encode()
    assert orjson.loads(stored) == {
        "generations": [[0, 1]],
        "lanes": {"high": [[1_000_000, 1]], "low": [[2_000_000, 1]]},
    }


@given(routes())
def test_a_route_with_lanes_is_read_as_it_was_stored(route: Route) -> None:
    assert Route.decode(route.encode()) == route


@given(routes(), routes())
def test_a_joined_route_has_all_partitions_of_both(one: Route, other: Route) -> None:
    joined = one.joined(other)
    assert set(joined.indexes) >= {*one.indexes, *other.indexes}
    assert set(joined.lanes) == {*one.lanes, *other.lanes}
    assert joined.joined(other) == joined
    assert Route.decode(joined.encode()) == joined


@pytest.mark.parametrize(
    "wrong",
    [
        b'{"generations": [[1000000, 1]]}',
        b'{"generations": [[999999, 2]]}',
        b'{"generations": [[0, 1]], "lanes": {"high": [[0, 1]]}}',
        b'{"generations": [[0, 1]], "lanes": {"high": []}}',
        b'{"generations": [[0, 1]], "lanes": {"urgent": [[1000000, 1]]}}',
        b'{"generations": [[0, 1]], "lanes": [1]}',
    ],
)
def test_a_route_with_lanes_that_no_version_wrote_is_refused(wrong: bytes) -> None:
    with pytest.raises(UnreadableRoute):
        Route.decode(wrong)


def test_a_lane_that_has_used_all_its_indexes_is_not_changed_into_the_next_one() -> None:
    full = Route((Generation(999_990, 10),))
    with pytest.raises(ValueError, match="below 1000000 partitions"):
        full.changed(4)
