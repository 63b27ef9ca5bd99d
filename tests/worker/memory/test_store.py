"""Conformance of the memory store over SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from perdure.queues.errors import ConfigurationError
from perdure.worker.memory import (
    EmbedderFailed,
    EmbedderMismatch,
    HashingEmbedder,
    HybridStore,
    Memory,
    MemoryStoreMissing,
    NewMemory,
    Policy,
    SqliteBackend,
    new_memory,
)
from perdure.worker.memory.text import normal

from tests.support.memory_stores import DAY, Angles, Numbers, Stores, remember
from tests.support.paths import PROGRAMS

ADDER = PROGRAMS / "rememberer.py"


def texts(found: Any) -> list[str]:
    return [getattr(one, "memory", one).text for one in found]


# storing


async def test_a_memory_is_read_back_by_another_connection(store: HybridStore, stores: Stores) -> None:
    new = NewMemory(
        text=" Größe: 'naïve' \"x\"; DROP TABLE memories; -- 🌋\nline two ",
        type="lesson",
        tags=("a", "b"),
        metadata={"null": None, "deep": {"list": [1, 2.5, "\u2028"]}},
        source="file:///x",
        importance=0.75,
    )
    stored = await store.add(new, owner="researcher", key="task:step")
    assert stored.text == new.text.strip()
    assert (stored.owner, stored.key, stored.accesses) == ("researcher", "task:step", 0)
    assert stored.created == stored.accessed == stored.updated == stores.clock.now
    async with stores() as other:
        assert await other.get([stored.id, "no such id"]) == [stored]
        assert await other.list() == [stored]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"text": " \n "}, "text"),
        ({"text": "x" * 32_769}, "text"),
        ({"text": "null\0"}, "null character"),
        ({"text": "half a pair \ud800"}, "text"),
        ({"text": "x", "importance": 1.5}, "importance"),
        ({"text": "x", "importance": math.nan}, "importance"),
        ({"text": "x", "type": ""}, "type"),
        ({"text": "x", "tags": ("",)}, "tags"),
        ({"text": "x", "metadata": {"when": object()}}, "metadata"),
    ],
)
def test_an_invalid_memory_is_refused_with_its_field(fields: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        new_memory(**fields)


async def test_listing_filters_and_counts(store: HybridStore) -> None:
    await remember(store, "one", "two", owner="a", type="fact", tags=("x",))
    await remember(store, "three", owner="b", type="lesson", tags=("x", "y"))
    assert texts(await store.list()) == ["three", "two", "one"]
    assert texts(await store.list(limit=2)) == ["three", "two"]
    assert texts(await store.list(owner="a")) == ["two", "one"]
    assert texts(await store.list(owner=["a", "b"], type=["lesson", "other"])) == ["three"]
    assert texts(await store.list(tags=["x", "y"])) == ["three"]
    assert texts(await store.list(owner=[])) == []
    assert await store.count(tags=["x"]) == 3
    assert [one.text async for one in store.export(owner="a")] == ["one", "two"]


async def test_forget_and_touch_are_limited_to_the_owner(store: HybridStore) -> None:
    [mine] = await remember(store, "mine", owner="a")
    assert await store.forget([mine.id], owner="b") == 0
    assert await store.touch([mine.id], owner="b") == 0
    assert await store.touch([mine.id, "no such id"], owner="a") == 1
    assert await store.forget([mine.id, mine.id], owner="a") == 1
    assert await store.list() == []


# searching


async def test_inflected_words_are_found_best_first(store: HybridStore) -> None:
    await remember(store, "The deploy failed on Friday", "Deploys are frozen, deploying is not possible", "Cats sleep")
    found = await store.search("was the deployment deploying?")
    assert "Cats sleep" not in texts(found)
    assert len(found) >= 2
    assert found[0].text_rank == 1
    assert found[0].vector_rank is None
    assert found[0].score == pytest.approx(0.5 / 61)


async def test_a_search_filters_by_owner_type_tags_and_limit(store: HybridStore) -> None:
    await remember(store, "red apple", "red pear", owner="a", tags=("fruit",))
    await remember(store, "red car", owner="b", type="thing", tags=("metal", "fast"))
    assert texts(await store.search("red", owner="b")) == ["red car"]
    assert texts(await store.search("red", type="fact", limit=1)) == ["red apple"]
    assert texts(await store.search("red", tags=["metal", "fast"])) == ["red car"]
    assert texts(await store.search("fruit")) != []  # tags are searched as well
    assert await store.search("red", limit=0) == []


HOSTILE = [
    "", "   ", '"', "'", "*", "NEAR(", "a AND", "OR", "NOT", "or or or", "text:red", "^red", "red*", "-red", "(red",
    "red) OR (1=1", "{red} : +", '"red', "\\", "%", "_", "; DROP TABLE memories", "red\0apple", "🌋", "a:b|c&!d<->e",
]  # fmt: skip


async def test_no_query_is_a_syntax_error(store: HybridStore) -> None:
    await remember(store, "red apple")
    for query in HOSTILE:
        assert texts(await store.search(query)) == (["red apple"] if "red" in query else []), query


async def test_any_text_can_be_a_query(store: HybridStore) -> None:
    await remember(store, "red apple")

    @settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.text(max_size=60))
    def ask(query: str) -> None:
        asyncio.run_coroutine_threadsafe(store.search(query), loop).result(30)

    loop = asyncio.get_running_loop()
    await asyncio.to_thread(ask)


async def test_both_rankings_are_fused(stores: Stores) -> None:
    angles = {"alpha one": 0.0, "beta two": 30.0, "alpha three": 60.0, "gamma": 100.0, "alpha": 0.0}
    async with stores(Angles(angles)) as store:
        await remember(store, "alpha three", "beta two", "alpha one", "gamma")
        found = {one.memory.text: one for one in await store.search("alpha")}
    assert list(found) == ["alpha one", "alpha three", "beta two"]  # the cosine of gamma is negative
    assert {text: one.vector_rank for text, one in found.items()} == {"alpha one": 1, "beta two": 2, "alpha three": 3}
    assert {text: one.text_rank for text, one in found.items() if one.text_rank} == {"alpha three": 1, "alpha one": 2}
    assert found["alpha one"].score == pytest.approx(0.5 * (1 / 62 + 1 / 61))
    assert found["alpha three"].score == pytest.approx(0.5 * (1 / 61 + 1 / 63))
    assert found["beta two"].score == pytest.approx(0.5 / 62)
    similarity = found["beta two"].similarity
    assert similarity == pytest.approx(math.cos(math.radians(30)), abs=1e-6)


async def test_a_memory_weakens_by_half_in_69_days_and_use_keeps_it(store: HybridStore, stores: Stores) -> None:
    old, used = await remember(store, "alpha old", "alpha used", importance=1.0)
    stores.clock.now += 69.314718 * DAY
    await store.touch([used.id])
    found = await store.search("alpha")
    assert texts(found) == ["alpha used", "alpha old"]
    assert found[0].score == pytest.approx((1 + 0.1 * math.log(2)) / 62)
    assert found[1].score == pytest.approx(0.5 / 61)
    stores.clock.now -= 365 * DAY  # a clock that goes back makes nothing stronger
    assert (await store.search("alpha"))[-1].score == pytest.approx(1 / 61)
    assert (await store.get([old.id]))[0].accesses == 0


# equality


async def test_equal_normal_forms_are_one_memory(store: HybridStore, stores: Stores) -> None:
    first = await store.add(new_memory("The limit is 10.", tags=("a",), metadata={"x": 1, "y": 1}, importance=0.9))
    stores.clock.now += 5
    again = new_memory("the  LIMIT is 10 …", tags=("b", "a"), metadata={"y": 2}, importance=0.2)
    second = await store.add(again)
    assert second.id == first.id
    assert second.text == again.text
    assert (second.tags, second.metadata) == (("a", "b"), {"x": 1, "y": 2})
    assert (second.importance, second.accesses, second.former) == (0.9, 1, (first.text,))
    assert (second.created, second.accessed, second.updated) == (first.created, first.created + 5, first.created + 5)
    assert await store.list() == [second]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("It costs 1.5 EUR", "It costs 15 EUR"),
        ("It runs on C", "It runs on C#"),
        ("-5 degrees", "5 degrees"),
        ("It is safe", "It is safe?"),
        (".5 is half", "5 is half"),
        ("...", "!!!"),
    ],
)
def test_meaningful_punctuation_distinguishes_texts(one: str, other: str) -> None:
    assert normal(one) != normal(other)


async def test_equal_texts_of_other_types_and_owners_are_separate(stores: Stores) -> None:
    async with stores(Angles({"x": 0, "X!": 0, "like x": 1.0})) as store:
        await remember(store, "x", owner="a", type="fact")
        await remember(store, "X!", owner="b", type="fact")
        await remember(store, "like x", owner="a", type="lesson")
        assert sorted(texts(await store.list())) == ["X!", "like x", "x"]


async def test_similar_vectors_neither_merge_nor_link(stores: Stores) -> None:
    long = "a " * 16_000
    everything = ["cats sleep", "cats eat", "9 cats", "10 cats", *(f"{long}{number}" for number in range(3))]
    async with stores(Angles(dict.fromkeys(everything, 10.0))) as store:
        added = await remember(store, *everything)
        assert len({memory.id for memory in added}) == len(everything)
        assert {memory.links for memory in await store.list()} == {()}


async def test_a_merged_memory_has_the_vector_of_its_new_text(stores: Stores) -> None:
    async with stores(Angles({"cats sleep": 0.0, "The CATS sleep": 60.0, "query": 60.0})) as store:
        first, second = await remember(store, "cats sleep", "The CATS sleep")
        assert (second.id, second.text, second.former) == (first.id, "The CATS sleep", ("cats sleep",))
        assert (await store.search("query"))[0].similarity == pytest.approx(1.0, abs=1e-5)


async def test_the_last_five_earlier_texts_are_kept(store: HybridStore) -> None:
    wordings = ["wording" + "!" * n for n in range(9)]
    last = [await remember(store, wording) for wording in (*wordings, wordings[-1])][-1][0]
    assert last.former == tuple(wordings[3:8])
    assert last.accesses == 9


# once per key


async def test_a_known_key_changes_nothing(store: HybridStore, stores: Stores) -> None:
    first = await store.add(new_memory("as the model said it first"), key="t:s")
    assert await store.add(new_memory("in other words, the second time"), key="t:s") == first
    assert await store.list() == [first]
    merged = await store.add(new_memory("As the MODEL said it first"), key="t:s:2")
    assert merged.accesses == 1
    assert await store.add(new_memory("As the model said it first!"), key="t:s:2") == merged  # its key is known too
    stores.clock.now += 91 * DAY
    await store.add(new_memory("something else"), key="other")
    assert (await store.add(new_memory("now it is new"), key="t:s")).id != first.id


async def test_a_known_key_embeds_nothing(stores: Stores) -> None:
    embedder = Angles()
    async with stores(embedder) as store:
        await store.add(new_memory("x"), key="t:s")
        await store.add(new_memory("y"), key="t:s")
    assert embedder.asked == [["x"]]


async def test_forgetting_with_a_key_answers_a_repeated_call_like_the_first(store: HybridStore) -> None:
    """The reply of the first was lost, or the worker died before it recorded the step."""
    one, two = await remember(store, "the first fact", "another one")
    ids = [one.id, two.id, "no such id"]
    assert [await store.forget(ids, key="t:s") for _ in range(3)] == [2, 2, 2]
    assert await store.forget(ids, key="t:s:2") == 0
    assert await store.forget(ids) == 0


async def test_touching_with_a_key_counts_once(store: HybridStore) -> None:
    [one] = await remember(store, "x")
    assert [await store.touch([one.id], key="t:s") for _ in range(2)] == [1, 1]
    assert (await store.get([one.id]))[0].accesses == 1


async def test_a_forgotten_memory_can_be_added_again(store: HybridStore) -> None:
    first = await store.add(new_memory("x"), key="t:s")
    await store.forget([first.id])
    assert (await store.add(new_memory("x"), key="t:s")).id != first.id


def run_adders(place: str, *tasks: list[tuple[str, str | None, str]]) -> list[Memory]:
    """Run processes that add at once: each reports that it is ready, then opens its store and adds on a signal."""
    environment = os.environ | {"PERDURE_MEMORY": place}
    processes = [
        subprocess.Popen(
            [sys.executable, str(ADDER), json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for task in tasks
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    added = [process.communicate(timeout=30)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [Memory.model_validate_json(line) for out in added for line in out.splitlines()]


async def test_concurrent_processes_that_add_equal_texts_store_one_memory(place: str, stores: Stores) -> None:
    """The processes also create the store at once: its file or tables do not exist before. Sources are kept apart."""
    one: list[tuple[str, str | None, str]] = [(f"{n} of all", f"t:s:{n}" if n % 2 else None, "") for n in range(40)]
    other = [(text + "!", key, "") for text, key, _ in one]
    one += [(f"{n} of all", None, "task:1") for n in range(40, 50)]
    other += [(f"{n} of all", None, "task:2") for n in range(40, 50)]
    added = await asyncio.to_thread(run_adders, place, one, other)
    assert len(added) == 100
    async with stores(Numbers()) as store:
        there = await store.list(limit=100)
    assert {one.id for one in added} == {one.id for one in there}
    merged, apart = [one for one in there if not one.source], [one for one in there if one.source]
    # of two writes with one key, only one counted
    assert [one.accesses for one in sorted(merged, key=lambda one: int(one.text.partition(" ")[0]))] == [1, 0] * 20
    assert {(one.text, one.source) for one in apart} == {
        (f"{n} of all", f"task:{source}") for n in range(40, 50) for source in (1, 2)
    }


async def test_concurrent_writes_with_one_key_store_one_memory(store: HybridStore) -> None:
    news = [new_memory(f"in words of its own {n}", type=f"type {n}") for n in range(12)]
    added = await asyncio.gather(*(store.add(new, key="t:s") for new in news))
    assert len({one.id for one in added}) == 1
    assert await store.count() == 1


# embedders


async def test_vectors_of_another_dimension_or_embedder_are_refused_with_the_remedy(stores: Stores, place: str) -> None:
    async with stores(Angles()) as store:
        await remember(store, "x")
    for other in (Angles(dimension=3), Angles(name="others")):
        with pytest.raises(EmbedderMismatch) as refused:
            await stores(other).open()
        text = str(refused.value)
        assert f"'angles' with 2 dimensions, but {other.name!r} with {other.dimension}" in text
        assert "perdure memory reembed" in text
        assert place.partition("?")[0].removeprefix("postgresql:///") in text
    async with stores() as words_only:
        assert texts(await words_only.search("x")) == ["x"]


async def test_reembedding_keeps_the_old_vectors_until_it_ends(stores: Stores) -> None:
    async with stores(Numbers()) as old:
        await remember(old, *(f"{n} of all" for n in range(70)))
        async with stores() as store:
            await remember(store, "70 was added without an embedder")
        new = Numbers("new")
        again = stores(new)
        await again.open_for_reembedding()
        async for count in again.reembed():
            assert count == 64
            break  # interrupted
        assert (await old.search("69"))[0].vector_rank == 1
        with pytest.raises(EmbedderMismatch):
            await stores(new).open()
        assert [count async for count in again.reembed()] == [7]
        assert new.asked[64:] == [f"{n} of all" for n in range(64, 70)] + ["70 was added without an embedder"]
        with pytest.raises(EmbedderMismatch):  # it was open during the reembedding
            await remember(old, "71")
        with pytest.raises(EmbedderMismatch):
            await old.search("69")
        await again.close()
    async with stores(new) as store:
        assert [(await store.search(str(n)))[0].vector_rank for n in (0, 69, 70)] == [1, 1, 1]
        assert texts(await store.search("71")) == []


@pytest.mark.parametrize(
    ("embedded", "problem"),
    [
        ([[1.0, 0.0, 0.0]], "3 dimensions"),
        ([], "0 vectors for 1 texts"),
        ([[math.nan, 1.0]], "infinite number or NaN"),
        (["ab"], "ValueError"),
        (None, "TypeError"),
    ],
)
async def test_an_invalid_embedding_is_reported_and_nothing_is_stored(
    stores: Stores, embedded: Any, problem: str
) -> None:
    class Broken(Angles):
        def embed(self, texts: list[str]) -> Any:
            return embedded

    async with stores(Broken()) as store:
        with pytest.raises(EmbedderFailed, match=problem) as failed:
            await remember(store, "x")
        assert failed.value.embedder == "angles"
        assert await store.list() == []


async def test_an_embedder_may_be_async_and_return_zeros(stores: Stores) -> None:
    class Blind(Angles):
        async def embed(self, texts: list[str]) -> list[list[float]]:  # type: ignore[override]
            return [[0.0, 0.0] for _ in texts]

    async with stores(Blind()) as store:
        await remember(store, "x", "y")
        assert texts(await store.search("x")) == ["x"]


# maintenance


async def test_exported_memories_are_restored_unchanged(stores: Stores, tmp_path: Path) -> None:
    async with stores() as store:
        memories = list(await remember(store, "one", "two", "three", owner="a", tags=("t",)))
        await store.touch([memories[1].id])
        exported = [one async for one in store.export()]
        assert await store.restore(exported) == 0
    async with HybridStore(SqliteBackend(tmp_path / "copy" / "memory.sqlite3"), HashingEmbedder()) as copy:
        assert await copy.restore(exported[:2]) == 2
        assert await copy.restore(exported) == 1
        assert [one async for one in copy.export()] == exported
        assert (await copy.search("two"))[0].vector_rank == 1


async def test_pruning_follows_the_policy(store: HybridStore, stores: Stores) -> None:
    [weak] = await remember(store, "weak", importance=0.1)
    [old] = await remember(store, "old", importance=1.0)
    stores.clock.now += 100 * DAY
    kept = await remember(store, "a", "b", "c", owner="x", importance=0.5)
    [strong] = await remember(store, "d", owner="x", importance=0.9)
    [other] = await remember(store, "e", owner="y", importance=0.5)
    assert await store.prune(Policy(below=0.1), dry_run=True) == [weak.id]
    assert await store.prune(Policy(unused=99), dry_run=True) == [weak.id, old.id]
    gone = await store.prune(Policy(most=2, below=0.1), owner="x", dry_run=True)
    assert len(gone) == 2
    assert set(gone) < {one.id for one in kept}
    assert await store.count() == 7
    assert await store.prune(Policy(most=2, below=0.1)) == [weak.id, *gone]
    assert {one.id for one in await store.list()} == {old.id, strong.id, other.id, *(one.id for one in kept)} - set(
        gone
    )
    assert await store.search("weak") == []
    assert await store.prune(Policy(unused=0.001), owner="other") == []


async def test_a_memory_used_during_a_prune_is_kept(store: HybridStore, stores: Stores) -> None:
    [one] = await remember(store, "x")
    backend = store._backend
    stores.clock.now += 1
    await store.touch([one.id])
    assert await backend.prune([(one.id, one.accessed)]) == 0
    assert await backend.prune([(one.id, stores.clock.now)]) == 1


@pytest.mark.parametrize("policy", [{}, {"below": -1}, {"unused": math.nan}])
def test_an_empty_or_invalid_policy_is_refused(policy: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="pruning policy"):
        Policy(**policy)


async def test_a_read_does_not_create_a_store(stores: Stores) -> None:
    for _ in range(2):
        with pytest.raises(MemoryStoreMissing, match="perdure memory add"):
            await stores().open(create=False)
    async with stores():
        pass
    await (again := stores()).open(create=False)
    await again.close()


async def test_a_closed_store_is_reported(stores: Stores) -> None:
    with pytest.raises(RuntimeError, match="is not open"):
        await stores().list()
