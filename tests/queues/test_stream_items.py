"""Tests of the form of a stream's entries."""

from __future__ import annotations

import pytest
from perdure.queues.stream_items import (
    CUT_ALL,
    CUT_UNIT,
    check_stream,
    decode_item,
    entry_id,
    key_digest,
    keyed_field,
    stream_names,
)


def _fields(**given: str) -> list[bytes]:
    return [part.encode() for pair in given.items() for part in pair]


def test_item() -> None:
    item = decode_item(b"17-0", _fields(t="1700000000000", u="fetch", y="2", n="3", d='"a"'))
    assert (item.number, item.at, item.unit, item.attempt, item.position) == (17, 1_700_000_000_000, "fetch", 2, 3)
    assert (item.data, item.cut) == (b'"a"', b"")
    assert item.field("tokens") == "stream:tokens:fetch:2:3"
    assert entry_id(item.number) == "17-0"


def test_keyed_item() -> None:
    digest = key_digest("page-3")
    item = decode_item(b"1-0", _fields(t="1", u="", k=digest, d="{}"))
    assert item.field("pages") == keyed_field("pages", digest)
    assert item.key == digest


def test_marks() -> None:
    assert decode_item(b"4-0", _fields(t="1", u="fetch", y="2", cut="1")).cut == CUT_UNIT
    assert decode_item(b"5-0", _fields(t="1", u="", y="0", cut="all")).cut == CUT_ALL


@pytest.mark.parametrize(
    ("entry", "fields"),
    [
        (b"1-1", _fields(t="1", u="", y="0", n="1", d="1")),
        (b"x-0", _fields(t="1", u="", y="0", n="1", d="1")),
        (b"1-0", _fields(t="1", u="", y="0", n="1")),
        (b"1-0", _fields(t="-1", d="1")),
        (b"1-0", _fields(t="1" * 17, d="1")),
    ],
)
def test_entry_of_another_program(entry: bytes, fields: list[bytes]) -> None:
    with pytest.raises(ValueError, match="entry"):
        decode_item(entry, fields)


def test_names() -> None:
    assert stream_names(None) == []
    assert stream_names(b"output tokens") == ["output", "tokens"]
    assert check_stream("tokens") == "tokens"
    with pytest.raises(ValueError, match="name of a stream must be 1 to 64 letters"):
        check_stream("a:b")
