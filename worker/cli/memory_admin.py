"""`perdure memory export`, `prune` and `reembed`: what looks at all memories.

Memories from a file of JSON lines: all lines are checked before the first memory is stored.

    {"text": "Deploys are frozen on Fridays", "type": "rule", "owner": "ops", "tags": [], "metadata": {},
     "source": "", "importance": 0.5, "key": null}

A line with an id is one that was exported: it is stored as it was, with its times and counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, TextIO

import anyio
import typer
from pydantic import ValidationError

from ..memory import HybridStore, InvalidMemory, Memory, NewMemory, Policy, Salvage, make_store, new_memory
from ..memory.factory import is_postgres, store_path
from ..settings import Settings
from .enqueue import opened, problem
from .support.errors import Failed, Misuse
from .support.memory_store import Owner, Tags, Type, with_memory_store, with_store_options, without_embedder
from .support.options import read_object
from .support.output import AsJson, Bar, note, print_data, print_json, print_json_lines

__all__ = ["export", "prune", "reembed", "take_in"]


@with_store_options
def export(
    settings: Settings,
    *,
    owner: Owner = None,
    type: Type = None,
    tag: Tags = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Else stdout.", show_default=False)
    ] = None,
    salvage: Annotated[bool, typer.Option("--salvage", help="What can still be read of a damaged file.")] = False,
) -> None:
    """Write memories as JSON lines, the oldest first; they stay where they are. 'perdure memory add --file' reads them.

    Example: perdure memory export -o memories.jsonl
    Example: perdure memory export --salvage -o saved.jsonl
    """
    if salvage:
        _salvage(settings, output, owner, type, tag)
        return

    async def write() -> None:
        store = make_store(without_embedder(settings))
        await store.open(create=False)
        try:
            count = await store.count(owner=owner, type=type, tags=tag or ())
            with Bar("exporting", count) as bar, _opened(output) as file:
                async for memory in store.export(owner=owner, type=type, tags=tag or ()):
                    print_json_lines([memory.model_dump(mode="json")], file)
                    bar.advance()
            note(f"memories exported from {store.place}: {bar.done}")
        finally:
            await store.close()

    anyio.run(write)


def _salvage(
    settings: Settings, output: Path | None, owner: str | None, type: str | None, tag: list[str] | None
) -> None:
    if is_postgres(settings.memory):
        raise Misuse("--salvage is for a file: a damaged PostgreSQL has tools of its own")
    reading = Salvage(store_path(settings))
    with Bar("salvaging") as bar, _opened(output) as file:
        for memory in reading:
            of_owner, of_type = owner in (None, memory.owner), type in (None, memory.type)
            if of_owner and of_type and set(tag or ()) <= set(memory.tags):
                print_json_lines([memory.model_dump(mode="json")], file)
                bar.advance()
    note(f"memories salvaged from {store_path(settings)}: {bar.done}; places that cannot be read: {reading.lost}")
    if reading.lost:
        raise typer.Exit(1)


@contextmanager
def _opened(path: Path | None) -> Iterator[TextIO | None]:
    """The file to write to; None for stdout."""
    if path is None:
        yield None
        return
    try:
        with path.open("w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise Failed(f"cannot write {path}: {error.strerror}") from None


@with_memory_store(embeds=False)
async def prune(
    store: HybridStore,
    *,
    below: Annotated[
        float | None,
        typer.Option(metavar="STRENGTH", help="Those that are weaker; 'list' shows it.", show_default=False),
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(metavar="DAYS", help="Those that were not used for so long.", show_default=False),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(metavar="N", help="All but the N strongest of each owner and type.", show_default=False),
    ] = None,
    owner: Owner = None,
    type: Type = None,
    tag: Tags = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json: AsJson = False,
) -> None:
    """Remove memories that have grown weak, by a policy that you state; prints their ids, the weakest first.

    What meets any of --below, --older-than and --keep goes.

    Example: perdure memory prune --older-than 365 --keep 1000 --dry-run
    """
    policy = Policy(below=below, unused=older_than, most=keep)
    gone = await store.prune(policy, owner=owner, type=type, tags=tag or (), dry_run=dry_run)
    if json:
        print_json({"pruned": gone, "dry_run": dry_run})
    elif gone:
        print_data("\n".join(gone))
    note(f"memories that {'would go' if dry_run else 'are gone'}: {len(gone)}")


@with_memory_store(reembedding=True)
async def reembed(store: HybridStore, *, json: AsJson = False) -> None:
    """Embed all memories with the embedder that is set, for search by meaning: another one than before, or the first.

    Until it has ended, the store is searched by the former vectors. Broken
    off, it goes on where it was when it is called again.

    Example: perdure memory reembed
    """
    done = 0
    with Bar("embedding", await store.count()) as bar:
        async for done in store.reembed():
            bar.advance(done - bar.done)
    if json:
        print_json({"embedded": done})
    note(f"memories embedded: {done}, in {store.place}")


_SHOWN = 10
_AT_ONCE = 64


async def take_in(store: HybridStore, path: str, defaults: Mapping[str, Any]) -> dict[str, int]:
    """Store the file's memories, in its order; what a line does not say, `defaults` say. Returns how many were new."""
    with opened(path) as file:
        count = _check(file, defaults)
        new, began = 0, time.time()
        exported: list[Memory] = []
        with Bar("remembering", count) as bar:
            for line in _lines(file, defaults):
                if isinstance(line, Memory):
                    exported.append(line)
                    if len(exported) < _AT_ONCE:
                        continue
                else:
                    memory, owner, key = line
                    kept = await store.add(memory, owner=owner, key=key)
                    new += kept.created >= began and not kept.accesses
                    bar.advance()
                new += await store.restore(exported)
                bar.advance(len(exported))
                exported = []
            new += await store.restore(exported)
            bar.advance(len(exported))
    return {"stored": new, "known": count - new}


def _check(file: IO[bytes], defaults: Mapping[str, Any]) -> int:
    """Returns how many there are; `Misuse` names the lines that are none."""
    problems: list[str] = []
    count = wrong = 0
    for number, text in _numbered(file):
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
        raise Misuse(f"nothing was stored, {wrong} of {count} lines cannot be read:{listed}{more}")
    return count


def _lines(file: IO[bytes], defaults: Mapping[str, Any]) -> Iterator[Memory | tuple[NewMemory, str, str | None]]:
    for number, text in _numbered(file):
        try:
            yield _read(text, defaults)
        except (ValueError, ValidationError) as error:
            raise Failed(f"line {number} was changed while it was read: {problem(error)}") from None


def _numbered(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    file.seek(0)
    for number, line in enumerate(file, 1):
        if text := line.strip():
            yield number, text


def _read(text: bytes, defaults: Mapping[str, Any]) -> Memory | tuple[NewMemory, str, str | None]:
    fields = read_object(text)
    if "id" in fields:
        return Memory.model_validate(fields)
    fields = {**defaults, **fields}
    owner, key = fields.pop("owner"), fields.pop("key", None)
    if not isinstance(owner, str) or not (key is None or isinstance(key, str)):
        raise ValueError("owner and key are text")
    return new_memory(**{"text": None, **fields}), owner, key
