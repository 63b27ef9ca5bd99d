"""Stored form of a state: snapshots, and large values stored apart."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from perdure.worker.agents.journal.reducer import empty_state
from perdure.worker.agents.journal.snapshot import BLOB, LARGE, blob_key, decode_snapshot, encode_snapshot, split
from perdure.worker.errors import BadSnapshot


def state(**fields: Any) -> dict[str, Any]:
    return empty_state() | fields


def test_a_snapshot_returns_state_number_and_agent() -> None:
    found = decode_snapshot("t1", encode_snapshot(state(goal="find out"), 7, "research"))
    assert (found.number, found.agent, found.state) == (7, "research", state(goal="find out"))


def test_fields_missing_from_a_snapshot_have_their_defaults() -> None:
    data = orjson.dumps({"v": 1, "n": 3, "agent": "research", "state": {"goal": "old"}})
    assert decode_snapshot("t1", data).state == state(goal="old")


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ("x" * (LARGE + 1), True),
        ("x" * (LARGE - 1), True),
        ("x" * (LARGE - 2), False),
        (["word"] * LARGE, True),
        ({"word": "y" * LARGE}, True),
        (10, False),
    ],
)
def test_a_value_of_more_than_16_kb_of_json_is_stored_apart(value: Any, stored: bool) -> None:
    blobs: dict[str, bytes] = {}
    data = encode_snapshot(state(notes=value), 1, "research", blobs)
    assert bool(blobs) is stored
    assert all(key == blob_key(blob) for key, blob in blobs.items())
    assert len(data) < LARGE + 500
    assert decode_snapshot("t1", data, blobs).state["notes"] == value


def test_inner_values_are_stored_apart_first() -> None:
    before: dict[str, bytes] = {}
    after: dict[str, bytes] = {}
    page = "p" * 20_000
    encode_snapshot(state(pages={"a": page, "b": page + "!", "read": 1}), 1, "research", before)
    encode_snapshot(state(pages={"a": page, "b": page + "!", "read": 2}), 2, "research", after)
    assert len(before) == 2
    assert before.keys() == after.keys()


def test_nested_large_values_are_restored() -> None:
    blobs: dict[str, bytes] = {}
    whole = state(pages=[["z" * 20_000], *(f"{number:090d}" for number in range(300))])
    data = encode_snapshot(whole, 1, "research", blobs)
    assert len(blobs) == 2
    assert decode_snapshot("t1", data, blobs).state == whole


@pytest.mark.parametrize(
    "value", [{"$ref": "sha256:abc"}, {"$ref": ["sha256:abc"]}, {"$ref": {"$ref": "x" * 20_000}}, {"$ref": None}]
)
def test_a_users_value_in_the_shape_of_a_reference_is_kept(value: Any) -> None:
    blobs: dict[str, bytes] = {}
    assert decode_snapshot("t1", encode_snapshot(state(notes=value), 1, "a", blobs), blobs).state["notes"] == value
    assert decode_snapshot("t1", encode_snapshot(state(notes=value), 1, "a")).state["notes"] == value


def test_the_size_of_the_json_decides() -> None:
    for value in ("\u0000" * 3000, "é" * 9000, ["a", {"b": 1.5}], {"ü": [None, True]}, [], {}):
        blobs: dict[str, bytes] = {}
        split([value], blobs)
        assert bool(blobs) is (len(orjson.dumps(value)) > LARGE)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "not JSON"),
        (b'{"v":1,"n":3,"agent":"a","state":{"goal"', "not JSON"),
        (b"[]", "has no version"),
        (b'{"v":"one"}', "has no version"),
        (b'{"v":2,"n":1,"agent":"a","state":{}}', "version 2; this version of Perdure reads up to 1"),
        (b'{"v":1,"n":"x","agent":"a","state":{}}', "no number, agent or state"),
        (b'{"v":1,"n":-1,"agent":"a","state":{}}', "no number, agent or state"),
        (b'{"v":1,"n":1,"agent":"a","state":[]}', "no number, agent or state"),
        (b'{"v":1,"n":1,"agent":"a","state":{"plan":{}}}', "its plan must be a list"),
    ],
)
def test_a_broken_snapshot_is_an_error_that_names_the_task(data: bytes, problem: str) -> None:
    with pytest.raises(BadSnapshot, match=problem) as caught:
        decode_snapshot("t1", data)
    assert "task t1" in str(caught.value)


def test_a_large_value_that_is_missing_or_changed_is_an_error() -> None:
    blobs: dict[str, bytes] = {}
    data = encode_snapshot(state(notes="x" * 20_000), 1, "a", blobs)
    key = next(iter(blobs))
    with pytest.raises(BadSnapshot, match=f"'{BLOB}[0-9a-f]+' is missing"):
        decode_snapshot("t1", data)
    with pytest.raises(BadSnapshot, match="do not match its hash"):
        decode_snapshot("t1", data, {key: blobs[key].replace(b"x", b"y", 1)})
