"""`perdure memory`: add, search, list and forget long-term memories."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from ...memory.hybrid import HybridStore
from ...memory.memory import FoundMemory, Memory, new_memory, strength
from ..support.errors import Failed, Misuse
from ..support.memory_store import Owner, Subject, Tags, Type, with_memory_store
from ..support.output import AsJson, duration, note, print_data, print_json, print_table
from .admin import export, import_file, prune, reembed

app = typer.Typer(no_args_is_help=True, add_completion=False)

_SHOWN = 120
"""Characters of a text in a table."""


@app.callback()
def memory() -> None:
    """Add, search, list, forget, export and prune long-term memories of agents.

    Memories are in a file of this host (memory.sqlite3 in the data folder)
    or, for several hosts, in PostgreSQL (PERDURE_MEMORY=postgresql://...).
    Search goes by words and, with an embedder
    (PERDURE_EMBEDDER=wordllama or module:attribute), by meaning. These
    commands do not need Redis.
    """


@app.command()
@with_memory_store(create=True)
async def add(
    store: HybridStore,
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="Text of the memory.")] = None,
    *,
    type: Annotated[
        str, typer.Option(metavar="TYPE", help="Type of the memory; duplicates are found within a type.")
    ] = "fact",
    owner: Annotated[str, typer.Option(metavar="NAME", help="Name of the agent that owns it.")] = "",
    tag: Annotated[list[str] | None, typer.Option(metavar="TAG", help="Tag of the memory. Repeatable.")] = None,
    source: Annotated[str, typer.Option(metavar="SOURCE", help="Source of the information.")] = "",
    subject: Annotated[
        str, typer.Option(metavar="NAME", help="Subject of a profile, such as user:42; empty for the agent's own.")
    ] = "",
    importance: Annotated[float, typer.Option(min=0, max=1, help="Importance from 0 to 1.")] = 0.5,
    key: Annotated[str | None, typer.Option(metavar="KEY", help="Unique key: if it exists, nothing is stored.")] = None,
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Add the memories of this file of JSON lines; - for stdin.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Store a memory, and print its id.

    If the owner has a memory of this type, subject and source with the same
    content, that one is updated.

    Example: perdure memory add "Deploys are frozen on Fridays" --type rule --owner ops

    With --file, each line is one memory: {"text": ..., "type"?, "owner"?,
    "tags"?, "metadata"?, "source"?, "subject"?, "importance"?, "links"?,
    "key"?}. A link is a pair such as ["supersedes", ID]. All lines are
    checked before the first is stored. The file may be one that 'perdure
    memory export' wrote; memories that exist already are skipped.

    Example: perdure memory add --file memories.jsonl
    """
    if file is not None:
        if text is not None or key is not None:
            raise Misuse("TEXT and --key are for one memory: with --file, give them in each line")
        defaults = {"type": type, "owner": owner, "source": source, "subject": subject, "tags": tag or []}
        counts = await import_file(store, file, defaults)
        if json:
            print_json(counts)
        note(f"stored {counts['stored']} memories from {file} in {store.place}; {counts['known']} existed already")
        return
    if text is None:
        raise Misuse("give a TEXT, or a file of memories with --file")
    new = new_memory(text, type=type, tags=tuple(tag or ()), source=source, subject=subject, importance=importance)
    started_at = time.time()
    kept = await store.add(new, owner=owner, key=key)
    if json:
        print_json(kept.model_dump(mode="json"))
    else:
        print_data(kept.id)
        note(f"{'stored' if kept.created >= started_at else 'updated'} in {store.place}")


@app.command()
@with_memory_store()
async def search(
    store: HybridStore,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="Words or a question to search for.")],
    *,
    owner: Owner = None,
    type: Type = None,
    tag: Tags = None,
    subject: Subject = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Print at most N memories.")] = 10,
    floor: Annotated[
        float | None,
        typer.Option(
            min=-1, max=1, metavar="COSINE", help="Least similarity by meaning. Default: that of the embedder."
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Search memories by words and meaning, the best match first.

    Recent and frequent use raises the rank. If nothing matches, nothing is
    printed. Of memories that are linked to each other, the newest is printed,
    and the older ones below it as notes.

    Example: perdure memory search "when may I deploy?" --owner ops
    """
    found = await store.search(query, owner=owner, type=type, tags=tag or (), subject=subject, limit=limit, floor=floor)
    if json:
        print_json([one.model_dump(mode="json") for one in found])
    elif found:
        columns = ("id", "score#", "words#", "meaning#", "type", "owner", "source", "text")
        print_table(columns, [row for one in found for row in _found_rows(one)])
    else:
        note(f"no matching memories in {store.place}")


def _found_rows(found: FoundMemory) -> Sequence[Sequence[str]]:
    memory = found.memory
    by_words = "-" if found.text_rank is None else f"{found.text_rank}."
    by_meaning = "-" if found.vector_rank is None else f"{found.vector_rank}. ({found.similarity:.2f})"
    ranks = f"{found.score:.5f}", by_words, by_meaning
    first = memory.id, *ranks, memory.type, memory.owner or "-", _short(memory.source) or "-", _short(memory.text)
    notes = [
        (one.id, "", "", "", "", "", _short(one.source) or "-", f"{_NOTES[one.relation]}: {_short(one.text)}")
        for one in found.related
    ]
    return [first, *notes]


_NOTES = {"supersedes": "supersedes", "conflicts": "conflicts with", "same": "same as"}


@app.command("list")
@with_memory_store(embeds=False)
async def list_(
    store: HybridStore,
    *,
    owner: Owner = None,
    type: Type = None,
    tag: Tags = None,
    subject: Subject = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Print at most N memories.")] = 50,
    json: AsJson = False,
) -> None:
    """List memories, the newest first.

    The strength decides rank and pruning. Without use it halves in 69 days.

    Example: perdure memory list --owner ops --type rule
    """
    found = await store.list(owner=owner, type=type, tags=tag or (), subject=subject, limit=limit + 1)
    if json:
        print_json([one.model_dump(mode="json") for one in found[:limit]])
    elif found:
        now = time.time()
        columns = ("id", "type", "owner", "strength#", "uses#", "used", "source", "text")
        print_table(columns, [_row(one, now) for one in found[:limit]])
    else:
        note(f"no matching memories in {store.place}")
    if len(found) > limit:
        note(f"more than {limit} memories match: raise --limit to see them, or export them")


def _row(memory: Memory, now: float) -> Sequence[str]:
    used = f"{duration(max(0.0, now - memory.accessed))} ago"
    numbers = f"{strength(memory, now):.3f}", str(memory.accesses)
    return (
        memory.id,
        memory.type,
        memory.owner or "-",
        *numbers,
        used,
        _short(memory.source) or "-",
        _short(memory.text),
    )


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"


@app.command()
@with_memory_store(embeds=False)
async def forget(
    store: HybridStore,
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Ids of the memories.")] = None,
    *,
    every: Annotated[
        bool, typer.Option("--all", help="Select all memories that match --owner, --type, --tag and --subject.")
    ] = False,
    owner: Owner = None,
    type: Type = None,
    tag: Tags = None,
    subject: Subject = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Delete memories permanently, and print their ids.

    Example: perdure memory forget 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f
    Example: perdure memory forget --all --owner ops --dry-run
    """
    if bool(ids) == every:
        raise Misuse("give IDs, or --all with --owner, --type, --tag or --subject")
    if every and owner is None and type is None and subject is None and not tag:
        raise Misuse(
            "--all needs --owner, --type, --tag or --subject: to delete everything, delete the file or the tables"
        )
    if every:
        gone = [one.id async for one in store.export(owner=owner, type=type, tags=tag or (), subject=subject)]
    else:
        requested = list(dict.fromkeys(ids or ()))
        found = await store.get(requested)
        gone = [one.id for one in found if owner is None or one.owner == owner]
        if missing := [one for one in requested if one not in gone]:
            raise Failed(f"no memory {', '.join(missing)} in {store.place}: nothing was deleted")
    for at in range(0, 0 if dry_run else len(gone), 500):
        await store.forget(gone[at : at + 500], owner=owner)
    if json:
        print_json({"forgotten": gone, "dry_run": dry_run})
    elif gone:
        print_data("\n".join(gone))
    note(f"{'would delete' if dry_run else 'deleted'} {len(gone)} memories")


app.command()(export)
app.command()(prune)
app.command()(reembed)
