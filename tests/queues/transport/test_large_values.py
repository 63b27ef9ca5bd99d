"""References to large values, which another program may have written."""

from __future__ import annotations

import json

import pytest
from perdure.queues.errors import LargeValueLost
from perdure.queues.transport.large_values import LargeValue


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "0" * 24 + "../" * 10 + "etc/hostname"},
        {"digest": "0" * 24 + "A" * 64},
        {"digest": 5},
        {"size": -1},
        {"size": 1e400},
        {"chunks": "x"},
    ],
)
def test_the_name_of_an_object_is_a_hash(change: dict[str, object]) -> None:
    value = LargeValue("0" * 88, 5, 1)
    assert LargeValue.decode(value.encode()) == value
    damaged = json.dumps(value._asdict() | change).replace("Infinity", "1e400")
    with pytest.raises(LargeValueLost, match="its reference is damaged"):
        LargeValue.decode(b"#" + damaged.encode())
