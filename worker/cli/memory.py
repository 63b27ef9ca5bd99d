"""`perdure memory`: long-term memories, added, searched, listed, forgotten; memory_upkeep.py has what is for all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from ..memory import FoundMemory, HybridStore, Memory, new_memory, strength
from .memory_admin import export, prune, reembed, take_in
from .support.errors import Failed, Misuse
from .support.memory_store import Owner, Tags, Type, with_memory_store
from .support.output import AsJson, duration, note, print_data, print_json, print_table

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False)

_SHOWN = 120
"""Characters of a text in a table."""


@app.callback()
def memory() -> None:
    """What agents know beyond their tasks: add, search, list, forget, export, prune.

    Memories are in a file of this host (memory.sqlite3 in the data
    folder), or for many hosts in PostgreSQL (PERDURE_MEMORY=
    postgresql://...). They are found by their words, and with an embedder
    (PERDURE_EMBEDDER=module:attribute) by their meaning. No Redis is
    needed here.
    """


@app.command()
@with_memory_store(create=True)
async def add(
    store: HybridStore,
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="What to remember.", show_default=False)] = None,
    *,
    type: Annotated[
        str, typer.Option(metavar="TYPE", help="Its kind; what says the same is found within one type.")
    ] = "fact",
    owner: Annotated[str, typer.Option(metavar="NAME", help="Whose it is: an agent's name.", show_default=False)] = "",
    tag: Annotated[
        list[str] | None, typer.Option(metavar="TAG", help="May be given again.", show_default=False)
    ] = None,
    source: Annotated[str, typer.Option(metavar="SOURCE", help="Where it is from.", show_default=False)] = "",
    importance: Annotated[float, typer.Option(min=0, max=1, help="From 0 to 1.")] = 0.5,
    key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="With a key that is known, nothing happens.", show_default=False),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Memories as JSON lines; - for stdin.", show_default=False),
    ] = None,
    json: AsJson = False,
) -> None:
    """Remember something; prints its id. What says the same as another of its type and owner updates that one.

    Example: perdure memory add "Deploys are frozen on Fridays" --type rule --owner ops

    With --file, every line is one memory, and all are checked before any is
    stored: {"text": ..., "type"?, "owner"?, "tags"?, "metadata"?,
    "source"?, "importance"?, "key"?}
    What 'perdure memory export' wrote comes back as it was, unless it is
    there already.

    Example: perdure memory add --file memories.jsonl
    """
    if file is not None:
        if text is not None or key is not None:
            raise Misuse("TEXT and --key are for one memory: in a file, every line says its own")
        counts = await take_in(store, file, {"type": type, "owner": owner, "source": source, "tags": tag or []})
        if json:
            print_json(counts)
        note(f"memories from {file}: {counts['stored']} stored, {counts['known']} known already, in {store.place}")
        return
    if text is None:
        raise Misuse("say what to remember, or name a file with --file")
    new = new_memory(text, type=type, tags=tuple(tag or ()), source=source, importance=importance)
    began = time.time()
    kept = await store.add(new, owner=owner, key=key)
    if json:
        print_json(kept.model_dump(mode="json"))
    else:
        print_data(kept.id)
        note(f"it is in {store.place}{'' if kept.created >= began else ', and was known'}")


@app.command()
@with_memory_store()
async def search(
    store: HybridStore,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="Words, or a whole question.", show_default=False)],
    *,
    owner: Owner = None,
    type: Type = None,
    tag: Tags = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="No more than so many.")] = 10,
    json: AsJson = False,
) -> None:
    """Find memories, the best first: by words and meaning, the often and lately used before others.

    Example: perdure memory search "when may I deploy?" --owner ops
    """
    found = await store.search(query, owner=owner, type=type, tags=tag or (), limit=limit)
    if json:
        print_json([one.model_dump(mode="json") for one in found])
    elif found:
        columns = ("id", "score#", "words#", "meaning#", "type", "owner", "text")
        print_table(columns, [_found_row(one) for one in found])
    else:
        note(f"nothing is found in {store.place}")


def _found_row(found: FoundMemory) -> Sequence[str]:
    memory = found.memory
    by_words = "-" if found.text_rank is None else f"{found.text_rank}."
    by_meaning = "-" if found.vector_rank is None else f"{found.vector_rank}. ({found.similarity:.2f})"
    return memory.id, f"{found.score:.5f}", by_words, by_meaning, memory.type, memory.owner or "-", _short(memory.text)


@app.command("list")
@with_memory_store(embeds=False)
async def list_(
    store: HybridStore,
    *,
    owner: Owner = None,
    type: Type = None,
    tag: Tags = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="No more than so many.")] = 50,
    json: AsJson = False,
) -> None:
    """List memories, the newest first. What ranking and pruning go by is their strength; unused, it halves in 69 days.

    Example: perdure memory list --owner ops --type rule
    """
    found = await store.list(owner=owner, type=type, tags=tag or (), limit=limit + 1)
    if json:
        print_json([one.model_dump(mode="json") for one in found[:limit]])
    elif found:
        now = time.time()
        columns = ("id", "type", "owner", "strength#", "uses#", "used", "text")
        print_table(columns, [_row(one, now) for one in found[:limit]])
    else:
        note(f"no such memories in {store.place}")
    if len(found) > limit:
        note(f"there are more than {limit}: raise --limit to see them, or export them")


def _row(memory: Memory, now: float) -> Sequence[str]:
    used = f"{duration(max(0.0, now - memory.accessed))} ago"
    numbers = f"{strength(memory, now):.3f}", str(memory.accesses)
    return memory.id, memory.type, memory.owner or "-", *numbers, used, _short(memory.text)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"


@app.command()
@with_memory_store(embeds=False)
async def forget(
    store: HybridStore,
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Memories, by their ids.", show_default=False)
    ] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="All of --owner, --type and --tag instead.")] = False,
    owner: Owner = None,
    type: Type = None,
    tag: Tags = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json: AsJson = False,
) -> None:
    """Remove memories for good; prints their ids.

    Example: perdure memory forget 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f
    Example: perdure memory forget --all --owner ops --dry-run
    """
    if bool(ids) == every:
        raise Misuse("name memories by their ids, or say --all with --owner, --type or --tag")
    if every and owner is None and type is None and not tag:
        raise Misuse("--all needs --owner, --type or --tag: a whole store is removed by removing its file or tables")
    if every:
        gone = [one.id async for one in store.export(owner=owner, type=type, tags=tag or ())]
    else:
        asked = list(dict.fromkeys(ids or ()))
        there = await store.get(asked)
        gone = [one.id for one in there if owner is None or one.owner == owner]
        if missing := [one for one in asked if one not in gone]:
            raise Failed(f"nothing was forgotten, for there is no memory {', '.join(missing)} in {store.place}")
    for at in range(0, 0 if dry_run else len(gone), 500):
        await store.forget(gone[at : at + 500], owner=owner)
    if json:
        print_json({"forgotten": gone, "dry_run": dry_run})
    elif gone:
        print_data("\n".join(gone))
    note(f"memories that {'would be ' if dry_run else 'are '}forgotten: {len(gone)}")


app.command()(export)
app.command()(prune)
app.command()(reembed)
