"""Memories that say different things: kept apart, linked by the caller, and noted in search results."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import pytest
from perdure.worker.memory import HybridStore, Memory, MemoryLink, SqliteBackend, new_memory
from perdure.worker.memory.backend import Near
from perdure.worker.memory.hybrid import relevant

from tests.support.memory_stores import Angles, Stores, remember

WANTS, WANTS_NOT = "The customer does want EU data", "The customer does not want EU data"
TEN, TWELVE = "The limit is 10 requests", "The limit is 12 requests"


def near(*texts: str) -> Angles:
    """Return an embedder by which the texts have a similarity of almost 1."""
    return Angles({text: 1.0 * place for place, text in enumerate(texts)})


async def limits(store: HybridStore, **fields: Any) -> list[Memory]:
    """Store two limits, of which the second supersedes the first."""
    first = await store.add(new_memory(TEN, **fields))
    return [first, await store.add(new_memory(TWELVE, links=[("supersedes", first.id)], **fields))]


@pytest.mark.parametrize(("old", "new", "how"), [(WANTS, WANTS_NOT, "conflicts"), (TEN, TWELVE, "supersedes")])
async def test_of_memories_that_the_caller_links_the_newer_is_found(
    stores: Stores, old: str, new: str, how: Literal["conflicts", "supersedes"]
) -> None:
    async with stores(near(old, new)) as store:
        first = await store.add(new_memory(old, source="mail"), owner="a")
        stores.clock.now += 5
        second = await store.add(new_memory(new, source="mail", links=[(how, first.id)]), owner="a")
        assert first.id != second.id
        assert second.links == (MemoryLink(how, first.id),)
        [back] = (await store.get([first.id]))[0].links
        assert back == MemoryLink("conflicts" if how == "conflicts" else "superseded_by", second.id)
        [found] = await store.search(old)
        assert found.memory == second
        [note] = found.related
        assert (note.relation, note.text, note.source, note.id) == (how, old, "mail", first.id)
        assert await store.count() == 2
        await store.forget([second.id])
        [left] = await store.search(old)
        assert (left.memory.id, left.related) == (first.id, ())


async def test_similar_memories_that_contradict_each_other_are_linked(stores: Stores) -> None:
    async with stores(near(WANTS, WANTS_NOT)) as store:
        first = await store.add(new_memory(WANTS), owner="a")
        for other in ({"owner": "b"}, {"owner": "a", "type": "lesson"}, {"owner": "a", "subject": "user:7"}):
            owner = other.pop("owner")
            assert (await store.add(new_memory(WANTS_NOT, **other), owner=owner)).links == ()
        stores.clock.now += 5
        second = await store.add(new_memory(WANTS_NOT), owner="a")
        assert second.links == (MemoryLink("conflicts", first.id),)
        [back] = (await store.get([first.id]))[0].links
        assert back == MemoryLink("conflicts", second.id)
        [found] = await store.search(WANTS, owner="a", type="fact")
        assert found.memory == second
        assert [(note.relation, note.text) for note in found.related] == [("conflicts", WANTS)]
        stores.clock.now += 5
        await store.add(new_memory(WANTS), owner="a")
        [found] = await store.search(WANTS, owner="a", type="fact")
        assert (found.memory.id, [note.text for note in found.related]) == (first.id, [WANTS_NOT])


async def test_what_the_caller_says_of_a_contradiction_counts(stores: Stores) -> None:
    async with stores(near(WANTS, WANTS_NOT)) as store:
        first = await store.add(new_memory(WANTS))
        second = await store.add(new_memory(WANTS_NOT, links=[("supersedes", first.id)]))
        again = await store.add(new_memory(WANTS_NOT))
        assert second.links == again.links == (MemoryLink("supersedes", first.id),)


async def test_contradictions_are_not_linked_without_an_embedder_or_if_the_vectors_disagree(stores: Stores) -> None:
    async with stores() as store:
        await remember(store, WANTS, WANTS_NOT)
        assert [memory.links for memory in await store.list()] == [(), ()]
        assert len(await store.search(WANTS)) == 2
    async with stores(Angles({"It is on": 0.0, "It is off": 80.0})) as store:
        await remember(store, "It is on", "It is off")
        assert {memory.links for memory in await store.list()} == {()}


async def test_a_repeated_memory_is_linked_to_what_the_repetition_names(stores: Stores) -> None:
    async with stores(near(TEN, TWELVE)) as store:
        old, new = await remember(store, TEN, TWELVE)
        links = [("supersedes", old.id), ("conflicts", new.id), ("conflicts", "unknown")]
        again = await store.add(new_memory(TWELVE, links=links))
        assert again.id == new.id
        assert again.links == (MemoryLink("supersedes", old.id), MemoryLink("conflicts", "unknown"))
        assert (await store.get([old.id]))[0].links == (MemoryLink("superseded_by", new.id),)


async def test_a_superseded_statement_that_is_made_again_is_the_newer_one(stores: Stores) -> None:
    async with stores(near(TEN, TWELVE)) as store:
        await limits(store)
        stores.clock.now += 5
        last = await store.add(new_memory(TEN))
        [found] = await store.search("limit")
        assert (found.memory.id, found.memory.text) == (last.id, TEN)
        assert [(one.relation, one.text) for one in found.related] == [("supersedes", TWELVE)]
        [other] = await store.get([found.related[0].id])
        assert other.links == (MemoryLink("superseded_by", last.id),)


async def test_memories_of_other_sources_are_never_merged(stores: Stores) -> None:
    async with stores(near("cats sleep", "Cats sleep!", "The cats sleep")) as store:
        for text, source in (("cats sleep", "task:1"), ("Cats sleep!", "task:2"), ("The cats sleep", "task:3")):
            stores.clock.now += 5
            await store.add(new_memory(text, source=source))
        assert {(one.text, one.source) for one in await store.list()} == {
            ("cats sleep", "task:1"), ("Cats sleep!", "task:2"), ("The cats sleep", "task:3"),
        }  # fmt: skip
        [found] = await store.search("cats")
        assert found.memory.source == "task:3"
        assert [(one.relation, one.source) for one in found.related] == [("same", "task:2"), ("same", "task:1")]
        again = await store.add(new_memory("cats  sleep", source="task:1"))
        assert (again.accesses, await store.count()) == (1, 3)


async def test_equal_texts_of_other_sources_are_one_result_by_words(store: HybridStore, stores: Stores) -> None:
    for source in ("task:1", "task:2"):
        stores.clock.now += 5
        await store.add(new_memory("cats sleep", source=source))
    assert await store.count() == 2
    [found] = await store.search("cats")
    assert (found.memory.source, [one.source for one in found.related]) == ("task:2", ["task:1"])


async def test_memories_of_other_subjects_are_apart(stores: Stores) -> None:
    async with stores(near("likes tea", "Likes tea.")) as store:
        for subject in ("", "user:42", "user:7"):
            await remember(store, "likes tea", "Likes tea.", subject=subject)
        assert await store.count() == 3
        assert await store.count(subject="user:42") == 1
        for subject in ("", "user:42"):
            assert [one.memory.subject for one in await store.search("tea", subject=subject)] == [subject]
            assert [one.subject async for one in store.export(subject=subject)] == [subject]
            assert [one.subject for one in await store.list(subject=subject)] == [subject]
        assert len(await store.search("tea", subject=["user:42", "user:7"])) == 2


OTHERS: Final[list[dict[str, str]]] = [{"owner": "b"}, {"subject": "user:7"}, {"type": "lesson"}]
"""Differences of a scope to that of the memories of owner "a", subject "user:42" and type "fact"."""


async def test_memories_of_other_owners_subjects_or_types_are_never_merged_or_linked(stores: Stores) -> None:
    mine = {"owner": "a", "subject": "user:42", "source": "mail"}
    async with stores(near(TEN, TWELVE)) as store:
        [first] = await remember(store, TEN, **mine)
        for other in OTHERS:
            theirs = await remember(store, TEN, TWELVE, links=[("supersedes", first.id)], **mine | other)
            assert len({first.id, *(one.id for one in theirs)}) == 3
        assert (await store.get([first.id])) == [first]
        [found] = await store.search("limit", owner="a", subject="user:42", type="fact")
        assert (found.memory, found.related) == (first, ())


async def test_an_imported_link_to_another_owner_subject_or_type_shows_and_changes_nothing(stores: Stores) -> None:
    mine = {"owner": "a", "subject": "user:42"}
    async with stores(near(TEN, TWELVE)) as store:
        foreign = [one for other in OTHERS for one in await remember(store, TWELVE, **mine | other)]
        link = {"links": [MemoryLink("superseded_by", one.id) for one in foreign], "id": "forged", "type": "fact"}
        forged = Memory.model_validate(foreign[0].model_dump() | {"text": TEN} | link | mine)
        assert await store.restore([forged]) == 1
        [found] = await store.search(TEN, owner="a", subject="user:42", type="fact")
        assert (found.memory.id, found.related) == ("forged", ())
        await remember(store, TEN, **mine)  # merged: links back to what it is linked to
        assert await store.get([one.id for one in foreign]) == foreign


async def test_a_profile_has_a_stable_order_and_the_newest_statements(stores: Stores) -> None:
    async with stores(near(TEN, TWELVE)) as store:
        await remember(store, TEN, subject="user:42", importance=0.2)
        await remember(store, "speaks French", subject="user:42", importance=0.9)
        await remember(store, "speaks Greek", subject="user:7")
        before = [one.memory.text for one in await store.profile("user:42")]
        stores.clock.now += 5
        await store.touch([(await store.list(subject="user:42"))[-1].id])
        stores.clock.now += 9_000_000
        assert [one.memory.text for one in await store.profile("user:42")] == before == ["speaks French", TEN]
        [ten] = [one.memory for one in await store.profile("user:42") if one.memory.text == TEN]
        await remember(store, TWELVE, subject="user:42", importance=0.2, links=[("supersedes", ten.id)])
        profile = await store.profile("user:42")
        assert [one.memory.text for one in profile] == ["speaks French", TWELVE]
        assert [one.text for one in profile[1].related] == [TEN]
        assert await store.profile("user:42", limit=1) == profile[:1]


async def test_a_query_that_matches_nothing_returns_nothing(stores: Stores, store: HybridStore) -> None:
    await remember(store, "This is what we do with the data")
    assert await store.search("what is this?") == []
    assert await store.search("is the weather in Lima what it was?") == []
    assert len(await store.search("what is the data?")) == 1
    async with stores(Angles({"far": 0.0, "near": 60.0, "query": 70.0})) as vectors:
        await remember(vectors, "far", "near")
        assert [one.memory.text for one in await vectors.search("query", floor=0.5)] == ["near"]
        assert await vectors.search("query", floor=0.99) == []


async def test_one_shared_word_is_no_match_if_the_vectors_disagree(stores: Stores) -> None:
    async with stores() as store:
        await remember(store, "the train to Bern", tags=("travel",))
        assert len(await store.search("train to Hogwarts")) == 1
    async with stores(Angles({"train to Hogwarts": 0.0, "Zug": 60.0, "Train, Bern, travel": 0.0})) as store:
        assert len(await store.search("train to Hogwarts")) == 1  # it has no vector: words decide
        await remember(store, "trains stop here", "Zug")
        found = {one.memory.text: one for one in await store.search("train to Hogwarts")}
        assert found.keys() == {"Zug", "the train to Bern"}
        async for _ in store.reembed():
            pass
        assert [one.memory.text for one in await store.search("train to Hogwarts")] == ["Zug"]
        # all words of the query, in the text or the tags
        assert {one.memory.text for one in await store.search("Train, Bern, travel")} == {"the train to Bern", "Zug"}


async def test_a_memory_of_importance_0_raises_no_floor(stores: Stores) -> None:
    async with stores(Angles({"hidden": 0.0, "shown": 70.0, "query": 0.0})) as store:
        await remember(store, "hidden", importance=0)
        await remember(store, "shown")
        assert [one.memory.text for one in await store.search("query")] == ["shown"]


@pytest.mark.parametrize(
    ("similarities", "floor", "count"),
    [
        ([], 0.2, 0),
        ([0.2, 0.1], 0.2, 0),
        ([0.21, 0.2], 0.2, 1),
        ([0.8, 0.5, 0.49], 0.2, 2),  # the middle between 0.2 and 0.8 is 0.5
        ([0.3, 0.26, 0.24], 0.2, 2),
        ([1.0, 0.6, 0.5, 0.4], -1.0, 3),
        ([0.0, -0.5], -1.0, 0),
    ],
)
def test_matches_are_above_the_floor_and_near_the_best(similarities: list[float], floor: float, count: int) -> None:
    near = [Near(str(place), similarity) for place, similarity in enumerate(similarities)]
    assert relevant(near, floor) == near[:count]


async def test_the_floor_of_an_embedder_is_calibrated_once(stores: Stores) -> None:
    class Calibrated:
        """An embedder by which unrelated sentences are similar."""

        name, dimension = "similar", 2

        def __init__(self) -> None:
            self.calls = 0

        def embed(self, texts: list[str]) -> list[list[float]]:
            self.calls += 1
            return [[1.0, {"query": 0.0, "close": 0.05}.get(text, 1.0 - 0.2 * (len(text) % 2))] for text in texts]

    async with stores(embedder := Calibrated()) as store:
        await remember(store, "close", "other")
        for _ in range(2):
            assert await store.search("query") == []  # 0.9988 and 0.707 are below the calibrated 1
        assert embedder.calls == 5
        assert len(await store.search("query", floor=0.9)) == 1


async def test_links_are_exported_and_restored(stores: Stores, tmp_path: Path) -> None:
    async with stores(near(TEN, TWELVE)) as store:
        await limits(store, source="mail", subject="user:42")
        exported = [Memory.model_validate_json(one.model_dump_json()) async for one in store.export()]
    async with HybridStore(SqliteBackend(tmp_path / "copy.sqlite3")) as copy:
        assert await copy.restore(exported) == 2
        assert [one async for one in copy.export()] == exported
        [found] = await copy.search("limit", subject="user:42")
        assert len(found.related) == 1
