"""`perdure memory export`, `prune` and `reembed`, and the import of `memory add --file`.

Each line of a file is a JSON object:

    {"text": "Deploys are frozen on Fridays", "type": "rule", "owner": "ops", "tags": [], "metadata": {},
     "source": "", "subject": "", "importance": 0.5, "links": [], "key": null}

A line with an id was exported; it is stored unchanged, with its times and counts. All lines are checked before the
first memory is stored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Annotated, Any

import anyio
import typer
from pydantic import ValidationError

from ...memory.errors import InvalidMemory
from ...memory.factory import is_postgres, make_store, store_path
from ...memory.hybrid import HybridStore
from ...memory.memory import Memory, NewMemory, new_memory
from ...memory.pruning import Policy
from ...memory.sqlite.salvage import Salvage
from ...settings import Settings
from ..enqueue import problem
from ..support.errors import Failed, Misuse
from ..support.input_file import numbered_lines, opened
from ..support.memory_store import Owner, Subject, Tags, Type, with_memory_store, with_store_options, without_embedder
from ..support.options import OutputFile, open_output, read_object
from ..support.output import AsJson, Bar, note, print_data, print_json, print_json_lines


@with_store_options
def export(
    settings: Settings,
    *,
    owner: Owner = None,
    type: Type = None,
    tag: Tags = None,
    subject: Subject = None,
    output: OutputFile = None,
    salvage: Annotated[
        bool, typer.Option("--salvage", help="Export what can still be read of a damaged file.")
    ] = False,
) -> None:
    """Write memories as JSON lines, the oldest first.

    Use it for backups, or to move memories to another store: 'perdure
    memory add --file' imports the file. The memories are not changed.

    Example: perdure memory export -o memories.jsonl
    Example: perdure memory export --salvage -o saved.jsonl
    """
    if salvage:
        _salvage(settings, output, owner, type, tag, subject)
        return

    async def write() -> None:
        store = make_store(without_embedder(settings))
        await store.open(create=False)
        try:
            count = await store.count(owner=owner, type=type, tags=tag or (), subject=subject)
            with Bar("exporting", count) as bar, open_output(output) as file:
                async for memory in store.export(owner=owner, type=type, tags=tag or (), subject=subject):
                    print_json_lines([memory.model_dump(mode="json")], file)
                    bar.advance()
            note(f"exported {bar.done} memories from {store.place}")
        finally:
            await store.close()

    anyio.run(write)


def _salvage(
    settings: Settings,
    output: Path | None,
    owner: str | None,
    type: str | None,
    tag: list[str] | None,
    subject: str | None,
) -> None:
    if is_postgres(settings.memory):
        raise Misuse("--salvage is for a file: for PostgreSQL use its own recovery tools")
    reading = Salvage(store_path(settings))
    with Bar("salvaging") as bar, open_output(output) as file:
        for memory in reading:
            wanted = zip((owner, type, subject), (memory.owner, memory.type, memory.subject), strict=True)
            if all(asked in (None, there) for asked, there in wanted) and set(tag or ()) <= set(memory.tags):
                print_json_lines([memory.model_dump(mode="json")], file)
                bar.advance()
    note(f"salvaged {bar.done} memories from {store_path(settings)}; unreadable places: {reading.lost}")
    if reading.lost:
        raise typer.Exit(1)


@with_memory_store(embeds=False)
async def prune(
    store: HybridStore,
    *,
    below: Annotated[
        float | None,
        typer.Option(min=0, metavar="STRENGTH", help="Delete memories with less strength; 'memory list' shows it."),
    ] = None,
    older_than: Annotated[
        float | None, typer.Option(min=0, metavar="DAYS", help="Delete memories that were not used for this time.")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Delete all but the N strongest of each owner and type.")
    ] = None,
    owner: Owner = None,
    type: Type = None,
    tag: Tags = None,
    subject: Subject = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Delete weak or unused memories, and print their ids, the weakest first.

    A memory is deleted if any of --below, --older-than and --keep selects it.

    Example: perdure memory prune --older-than 365 --keep 1000 --dry-run
    """
    if below is None and older_than is None and keep is None:
        raise Misuse("nothing selects memories: give --below STRENGTH, --older-than DAYS or --keep N")
    policy = Policy(below=below, unused=older_than, most=keep)
    gone = await store.prune(policy, owner=owner, type=type, tags=tag or (), subject=subject, dry_run=dry_run)
    if json:
        print_json({"pruned": gone, "dry_run": dry_run})
    elif gone:
        print_data("\n".join(gone))
    note(f"{'would delete' if dry_run else 'deleted'} {len(gone)} memories")


@with_memory_store(reembedding=True)
async def reembed(store: HybridStore, *, json: AsJson = False) -> None:
    """Embed all memories with the current embedder.

    Use it after you have set or changed PERDURE_EMBEDDER. Until it has
    finished, search uses the previous vectors. If it is interrupted, the
    next call continues where it stopped.

    Example: perdure memory reembed
    """
    done = 0
    with Bar("embedding", await store.count()) as bar:
        async for done in store.reembed():
            bar.advance(done - bar.done)
    if json:
        print_json({"embedded": done})
    note(f"embedded {done} memories in {store.place}")


_SHOWN = 10
_BATCH = 64


async def import_file(store: HybridStore, path: str, defaults: Mapping[str, Any]) -> dict[str, int]:
    """Store the memories of a file in its order; return the numbers of new and of known ones.

    Args:
        defaults: Values for missing fields of a line.
    """
    with opened(path) as file:
        count = _check(file, defaults)
        new, started_at = 0, time.time()
        exported: list[Memory] = []
        with Bar("importing", count) as bar:
            for line in _lines(file, defaults):
                if isinstance(line, Memory):
                    exported.append(line)
                    if len(exported) < _BATCH:
                        continue
                else:
                    memory, owner, key = line
                    kept = await store.add(memory, owner=owner, key=key)
                    new += kept.created >= started_at and not kept.accesses
                    bar.advance()
                new += await store.restore(exported)
                bar.advance(len(exported))
                exported = []
            new += await store.restore(exported)
            bar.advance(len(exported))
    return {"stored": new, "known": count - new}


def _check(file: IO[bytes], defaults: Mapping[str, Any]) -> int:
    """Check all lines; return the number of memories.

    Raises:
        Misuse: Lines are invalid; the text lists them.
    """
    problems: list[str] = []
    count = wrong = 0
    for number, text in numbered_lines(file):
        count += 1
        try:
            _read(text, defaults)
        except (ValueError, InvalidMemory) as error:
            wrong += 1
            if wrong <= _SHOWN:
                problems.append(f"line {number}: {problem(error).replace('at line 1 column', 'at column')}")
    if wrong:
        more = f"\n  and {wrong - _SHOWN} more lines" if wrong > _SHOWN else ""
        listed = "".join(f"\n  {line}" for line in problems)
        raise Misuse(f"nothing was stored, {wrong} of {count} lines are invalid:{listed}{more}")
    return count


def _lines(file: IO[bytes], defaults: Mapping[str, Any]) -> Iterator[Memory | tuple[NewMemory, str, str | None]]:
    for number, text in numbered_lines(file):
        try:
            yield _read(text, defaults)
        except (ValueError, ValidationError) as error:
            raise Failed(f"line {number} changed while the file was read: {problem(error)}") from None


def _read(text: bytes, defaults: Mapping[str, Any]) -> Memory | tuple[NewMemory, str, str | None]:
    fields = read_object(text)
    if "id" in fields:
        return Memory.model_validate(fields)
    fields = {**defaults, **fields}
    owner, key = fields.pop("owner"), fields.pop("key", None)
    if not isinstance(owner, str) or not (key is None or isinstance(key, str)):
        raise ValueError("owner and key must be text")
    return new_memory(**{"text": None, **fields}), owner, key
