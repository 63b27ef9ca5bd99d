"""`perdure artifacts`: what the tasks of a deployment have saved, and what nothing links any more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

import anyio
import typer

from ...queues import Producer
from ..artifacts import ArtifactStore, all_links, orphans
from ..durable import artifact_store
from ..settings import load_settings
from .artifact import describe_link, size_text
from .connection import Place, placed
from .output import AsJson, duration, print_data, print_json, print_json_lines, print_table, tell
from .parameters import in_duration
from .progress import Bar

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def artifacts() -> None:
    """See what tasks have saved, and collect what nothing links."""


@app.command("list")
@placed
def list_(
    place: Place,
    *,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="No more than so many.")] = 1000,
    json: AsJson = False,
) -> None:
    """List the artifacts of all tasks that are kept, in no particular order. With --json: one object per line.

    Example: perdure artifacts list
    """
    anyio.run(_list, place, limit, json)


async def _list(place: Place, limit: int, json: bool) -> None:
    rows: list[tuple[str, str, str, str, str]] = []
    seen: set[tuple[str, str]] = set()
    async with place.producer() as producer:
        async for partition, task_id, links in all_links(producer.gateway, producer.namespace):
            for link in links:
                if (task_id, link.name) in seen:  # SCAN may find a task twice
                    continue
                if len(seen) == limit:
                    break
                seen.add((task_id, link.name))
                if json:
                    print_json_lines([{"task": task_id, "queue": partition.queue, **describe_link(link)}])
                else:
                    rows.append((task_id, link.name, size_text(link.size), link.media_type, link.hash))
            if len(seen) == limit:
                break
        if rows:
            print_table(("task", "name", "size#", "media type", "sha-256"), rows)
        elif not seen:
            tell(f"no artifacts of tasks of namespace {producer.namespace.name!r} on {producer.address.shown}")
    if len(seen) == limit:
        tell(f"there may be more than {limit}: raise --limit to see them")


@app.command()
@placed
def gc(
    place: Place,
    *,
    grace: Annotated[
        float,
        in_duration("Only what was saved, or saved again, longer ago than that: 24h, 30min, 7d, or seconds.", "24h"),
    ] = 86_400.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    json: AsJson = False,
) -> None:
    """Delete artifacts that no task links, and print their hashes.

    A run that dies between saving and linking leaves such, and so does a
    task whose record has expired. Tasks and workers may go on meanwhile:
    what they have saved within the grace stays.

    Example: perdure artifacts gc --dry-run
    """
    anyio.run(_collect, place, grace, dry_run, json)


async def _collect(place: Place, grace: float, dry_run: bool, json: bool) -> None:
    found: list[dict[str, object]] = []
    count = size = 0
    async with place.producer() as producer:
        store = await artifact_store(producer.gateway, load_settings(**place.overrides()))
        with Bar("tasks looked at") as bar:
            async for orphan in orphans(store, lambda: _linked(producer, bar), grace=grace):
                if dry_run or await store.remove(orphan.hash, grace):
                    count, size = count + 1, size + orphan.size
                    if json:
                        found.append({"hash": orphan.hash, "size": orphan.size, "modified": orphan.modified})
                    else:
                        print_data(orphan.hash)
        drafts = 0 if dry_run else await store.remove_drafts(grace)
    if json:
        print_json({"dry_run": dry_run, "store": store.shown, "count": count, "size": size, "orphans": found})
    _say(store, count, size, drafts, grace, dry_run=dry_run)


async def _linked(producer: Producer, bar: Bar) -> AsyncIterator[str]:
    async for _, _, links in all_links(producer.gateway, producer.namespace):
        bar.advance()
        for link in links:
            yield link.hash


def _say(store: ArtifactStore, count: int, size: int, drafts: int, grace: float, *, dry_run: bool) -> None:
    done = "would be deleted" if dry_run else "deleted"
    rest = f", and {drafts} that were never completed" if drafts else ""
    tell(f"{count} artifacts ({size_text(size)}) that no task links {done} in {store.shown}{rest}")
    if count and dry_run:
        tell(f"all of them were saved more than {duration(grace)} ago")
