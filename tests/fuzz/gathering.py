"""Many hostile entries at once, the same for the same seed."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.hostile import Fields, hostile_entries

__all__ = ["gather"]

BROOD = 4
"""Entries made of each that Hypothesis gives (which takes it milliseconds): itself, and what becomes of it."""

LARGE = 64 * 1024
"""Bytes from which an entry has no children."""


def gather(count: int, number: int) -> list[Fields]:
    """`count` hostile entries. number: the seed."""
    parents: list[Fields] = []

    @seed(number)
    @settings(
        max_examples=-(-count // BROOD),
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(hostile_entries())
    def take(fields: Fields) -> None:
        parents.append(fields)

    take()
    dice = random.Random(number)
    small = [one for one in parents if sum(len(value) for _, value in one) < LARGE]
    found = list(parents)
    while len(found) < count:
        found.append(_child(dice.choice(small), dice.choice(small), dice))
    dice.shuffle(found)
    return found[:count]


def _child(one: Fields, other: Fields, dice: random.Random) -> Fields:
    """An entry with a part of another, and in every third one some bits or bytes changed."""
    fields = list(one)
    place = len(fields) - 1
    fields[place] = (fields[place][0], dict(other).get(fields[place][0], fields[place][1]))
    if dice.random() < 0.3:
        place = dice.randrange(len(fields))
        name, value = fields[place]
        fields[place] = (name, _hurt(value, dice))
    return fields


def _hurt(value: bytes, dice: random.Random) -> bytes:
    data = bytearray(value)
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(len(data) + 1)
        match dice.randrange(4):
            case 0:
                data[at : at + 1] = bytes([dice.randrange(256)])
            case 1:
                del data[at : at + dice.randint(1, 20)]
            case 2:
                data[at:at] = data[max(0, at - 10) : at]
            case _ if at < len(data):
                data[at] ^= 1 << dice.randrange(8)
    return bytes(data)
