"""Late duplicates of uses of the key-value store: the bytes of a call arrive after later changes."""

from __future__ import annotations

import pytest
from perdure.queues.errors import StoreFenced
from perdure.queues.store.entries import EntryChange, Fence

from tests.conformance.late import Moments, Scene, Table
from tests.support.key_values import namespace_entries

KEY_VALUES = Table()

FORMER = Fence("x", b"1000-1", 1)
LATER = Fence("x", b"1000-1", 2)


@KEY_VALUES.each("put", "delete", "prefix", "large")
async def change_of_an_entry(scene: Scene, variant: str) -> Moments:
    """It is done once, also if another writer has changed the entry since."""
    mine, theirs = (namespace_entries(through, scene.namespace) for through in (scene.late, scene.gateway))
    await theirs.write([EntryChange("put", "a", data=b"1")])
    scene.hold("store_write")
    data = b"2" * (5000 if variant == "large" else 1)
    await mine.write([EntryChange("put", "a", data=data) if variant in ("put", "large") else EntryChange(variant, "a")])  # type: ignore[arg-type]
    yield
    await theirs.write([EntryChange("put", "a", data=b"3")])
    yield
    (found,) = await theirs.read(["a"])
    assert found is not None
    assert found.data == b"3"


@KEY_VALUES.each("store_read", "store_list", "store_write")
async def use_of_a_former_run(scene: Scene, variant: str) -> Moments:
    """It does not take the namespace from the run that followed."""
    mine, theirs = (namespace_entries(through, scene.namespace) for through in (scene.late, scene.gateway))
    await mine.write([EntryChange("put", "a", data=b"1")])
    scene.hold(variant)
    if variant == "store_read":
        await mine.read(["a"], FORMER)
    elif variant == "store_list":
        assert [entry.key async for entry in mine.scan(fence=FORMER)] == ["a"]
    else:
        await mine.write([EntryChange("put", "a", data=b"2")], fence=FORMER)
    yield
    await theirs.read(["a"], LATER)
    yield
    await theirs.write([EntryChange("put", "a", data=b"3")], fence=LATER)
    yield
    with pytest.raises(StoreFenced):
        await mine.read(["a"], FORMER)
