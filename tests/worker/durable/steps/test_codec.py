"""Digests of the arguments of steps."""

from __future__ import annotations

import hashlib

import pytest
from perdure.worker.durable.steps.codec import fingerprint
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
