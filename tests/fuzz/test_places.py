"""The table of keys that `make fuzz` mutates: no key of the package is missing."""

from __future__ import annotations

import re

import pytest
from perdure.queues import Namespace, keys
from perdure.queues.keys import LimitKeys, Partition, SessionPartition

from tests.fuzz.places import NO_KEYS, STORE, TABLES, key_names, places

LINE = re.compile(r"^    (\{ns\S*) +(stream|zset|hash|string) ", re.MULTILINE)


@pytest.mark.parametrize("owner", [Partition, SessionPartition, LimitKeys, Namespace])
def test_every_name_of_the_module_is_mutated_or_makes_no_key(owner: type) -> None:
    assert key_names(owner) - NO_KEYS[owner] == TABLES[owner].keys()


def test_the_table_has_the_keys_and_types_that_the_module_lists() -> None:
    names = Namespace("ns")
    found = {
        (place.key.decode().replace(names.store(STORE).digest, "ID"), place.type)
        for place in places(names, Partition("ns", "queue", 7), SessionPartition("ns", 7))
    }
    listed = {
        (re.sub(r"(?<=:)[A-Z]+(:[A-Z]+)*$", "", key.replace(":n}", ":7}")), kind)
        for key, kind in LINE.findall(keys.__doc__ or "")
    }
    assert found == listed
