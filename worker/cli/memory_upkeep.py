"""`perdure memory export`, `prune` and `reembed`: what looks at all memories."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TextIO

import anyio
import typer

from ..memory import HybridStore, Policy, Salvage, make_store
from ..memory.opening import is_postgres, store_path
from ..settings import Settings
from .failures import Failed, Misuse
from .memory_place import Owner, Tags, Type, placed, stored, without_embedder
from .output import AsJson, print_data, print_json, print_json_lines, tell
from .progress import Bar

__all__ = ["export", "prune", "reembed"]


@placed
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
            tell(f"memories exported from {store.place}: {bar.done}")
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
    tell(f"memories salvaged from {store_path(settings)}: {bar.done}; places that cannot be read: {reading.lost}")
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


@stored(embeds=False)
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
    tell(f"memories that {'would go' if dry_run else 'are gone'}: {len(gone)}")


@stored(anew=True)
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
    tell(f"memories embedded: {done}, in {store.place}")
