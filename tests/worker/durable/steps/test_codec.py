"""Digests of the arguments of steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any

import pytest
from perdure.worker.durable.steps.codec import arguments_text, fingerprint
from pydantic_core import to_json

EVERY_CHARACTER = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))


@pytest.mark.parametrize(
    "value",
    [0, -1, 2**63 - 1, -(2**63), 2**64 - 1, 2**64, -(2**200), True, None, "", EVERY_CHARACTER, 1.5, 1e16, float("inf")],
    ids=lambda value: repr(value)[:20],
)
def test_all_plain_arguments_have_the_digest_of_their_json(value: object) -> None:
    """As Pydantic writes it, with which records of earlier versions were stored."""
    data = to_json((value, "b"))
    assert fingerprint((value, "b"), {}) == (hashlib.blake2b(data, digest_size=12).hexdigest(), data)


@pytest.mark.parametrize(
    "make",
    [lambda: (text for text in "12"), lambda: iter(["1", "2"]), lambda: map(str, (1, 2)), lambda: StringIO("1\n2")],
    ids=["generator", "iterator", "map", "file"],
)
def test_the_digest_of_arguments_leaves_iterators_and_files_to_the_step(make: Callable[[], Iterator[str]]) -> None:
    for wrap in (lambda found: found, lambda found: {"of": [found]}):
        found = make()
        digest, _ = fingerprint((wrap(found),), {"named": found})
        assert [text.strip() for text in found] == ["1", "2"]
        assert fingerprint((wrap(found),), {"named": found})[0] == digest


@pytest.mark.parametrize(
    ("value", "other"),
    [(b"\xff", b"\xfe"), ([b"\xff"], [b"\xfe"]), (bytearray(b"\xff"), bytearray(b"\xfe")), ("a\ud83d", "b\ud83d")],
    ids=repr,
)
def test_any_bytes_and_text_have_a_digest(value: Any, other: Any) -> None:
    digest, data = fingerprint((value,), {"again": value})
    assert digest == fingerprint((value,), {"again": value})[0] != fingerprint((other,), {"again": other})[0]
    assert arguments_text(data, None)
