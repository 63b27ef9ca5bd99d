"""`perdure memory`: add, search, list and forget long-term memories.

`perdure memory export`, `prune` and `reembed`, and the import of `memory add --file`.

Each line of a file is a JSON object:

    {"text": "Deploys are frozen on Fridays", "type": "rule", "owner": "ops", "tags": [], "metadata": {},
     "source": "", "subject": "", "importance": 0.5, "links": [], "key": null}

A line with an id was exported; it is stored unchanged, with its times and counts. All lines are checked before the
first memory is stored.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ....queues.keys import belongs_to, owner_of_tenant
from ....queues.wording import short
from ...memory.factory import is_postgres, make_store, store_path
from ...memory.hybrid import HybridStore, Policy
from ...memory.memory import RELATIONS, FoundMemory, Memory, NewMemory, new_memory, strength
from ...memory.sqlite import Salvage
from ...settings import Settings, load_settings
from ..support.connection import TenantName, warn_of_password
from ..support.errors import Failed, Misuse
from ..support.options import DryRun, OutputFile, check_lines, in_duration, open_output, opened, read_lines, read_object
from ..support.output import Bar, Column, StderrText, Table, Time, note, print_json_lines, table
from ..support.runner import OptionGroup, Output, Resource, command

_PANEL = "Memory store"

StorePlace = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="PLACE",
        help="File, or postgresql://... Default: PERDURE_MEMORY, then memory.sqlite3 in the data folder. Give a URL "
        "with a password by PERDURE_MEMORY: all users of a machine can read command lines.",
        rich_help_panel=_PANEL,
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Data folder. Default: PERDURE_DATA_DIR, then a folder in your home folder.",
        rich_help_panel=_PANEL,
    ),
]

_DAY: Final = 86_400.0


def without_embedder(settings: Settings) -> Settings:
    """Return the settings for a command that embeds nothing, so that a different embedder is no conflict."""
    return settings.model_copy(update={"embedder": ""})


def store_settings(*, memory: str | None, **given: object) -> Settings:
    """Return the settings with the store of --memory."""
    warn_of_password("--memory", memory, "PERDURE_MEMORY")
    return load_settings(memory=memory, **given)


@dataclass(frozen=True, slots=True)
class StoreOptions(OptionGroup):
    """Options that name the memory store."""

    memory: StorePlace = None
    data_dir: DataDir = None

    @asynccontextmanager
    async def open(
        self, *, create: bool = False, embeds: bool = True, reembedding: bool = False
    ) -> AsyncIterator[HybridStore]:
        """Open the store.

        Args:
            create: Create it if it does not exist.
            embeds: Whether the command needs the embedder, if one is set.
            reembedding: Open it even if its vectors are from another embedder.
        """
        settings = self.settings()
        store = make_store(settings if embeds else without_embedder(settings))
        await (store.open_for_reembedding() if reembedding else store.open(create=create))
        try:
            yield store
        finally:
            await store.close()

    def settings(self) -> Settings:
        return store_settings(memory=self.memory, data_dir=self.data_dir)


def with_memory_store(**how: bool) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a command of an async function, which receives the open store. how: see `StoreOptions.open`."""
    return partial(command, resource=Resource(StoreOptions, lambda place: place.open(**how)))


@dataclass(frozen=True, slots=True)
class MemoryFilter(OptionGroup):
    """Options that select memories."""

    owner: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only memories of this agent; '' for those without an owner.")
    ] = None
    type: Annotated[str | None, typer.Option(metavar="TYPE", help="Only memories of this type.")] = None
    tag: Annotated[list[str] | None, typer.Option(metavar="TAG", help="Only memories with this tag. Repeatable.")] = (
        None
    )
    subject: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only memories about this subject, such as user:42; '' for the agents' own."),
    ] = None
    tenant: TenantName = None

    @property
    def own_tenant(self) -> str | None:
        """The tenant of the option, else that of the environment."""
        return tenant_or_default(self.tenant)

    @property
    def full_owner(self) -> str | None:
        """The owner as the store has it, with its tenant; None for any."""
        return None if self.owner is None else owner_of_tenant(self.own_tenant, self.owner)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for the store."""
        found = {"owner": self.full_owner, "type": self.type, "tags": self.tag or (), "subject": self.subject}
        return {**found, "tenant": self.own_tenant}

    def matches(self, memory: Memory) -> bool:
        wanted = zip(
            (self.full_owner, self.type, self.subject), (memory.owner, memory.type, memory.subject), strict=True
        )
        own = belongs_to(self.own_tenant, memory.owner)
        return (
            own and all(asked in (None, there) for asked, there in wanted) and set(self.tag or ()) <= set(memory.tags)
        )


def tenant_or_default(tenant: str | None) -> str | None:
    """Return the tenant of an option, else that of the environment."""
    return load_settings(tenant=tenant).tenant


app = typer.Typer(no_args_is_help=True, add_completion=False)


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
    tenant: TenantName = None,
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
) -> Output:
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
    if (own := tenant_or_default(tenant)) is not None:
        owner = owner_of_tenant(own, owner)
    if file is not None:
        if text is not None or key is not None:
            raise Misuse("TEXT and --key are for one memory: with --file, give them in each line")
        defaults = {"type": type, "owner": owner, "source": source, "subject": subject, "tags": tag or []}
        counts = await _import_file(store, file, defaults, own)
        stored = f"stored {counts['stored']} memories from {file} in {store.place}; {counts['known']} existed already"
        return Output(counts, notes=[stored])
    if text is None:
        raise Misuse("give a TEXT, or a file of memories with --file")
    new = new_memory(text, type=type, tags=tuple(tag or ()), source=source, subject=subject, importance=importance)
    started_at = time.time()
    kept = await store.add(new, owner=owner, key=key)
    done = f"{'stored' if kept.created >= started_at else 'updated'} in {store.place}"
    return Output(kept.model_dump(mode="json"), kept.id, StderrText(done))


@app.command()
@with_memory_store()
async def search(
    store: HybridStore,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="Words or a question to search for.")],
    wanted: MemoryFilter,
    *,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Print at most N memories.")] = 10,
    floor: Annotated[
        float | None,
        typer.Option(
            min=-1, max=1, metavar="COSINE", help="Least similarity by meaning. Default: that of the embedder."
        ),
    ] = None,
) -> Output:
    """Search memories by words and meaning, the best match first.

    Recent and frequent use raises the rank. If nothing matches, nothing is
    printed. Of memories that are linked to each other, the newest is printed,
    and the older ones below it as notes.

    Example: perdure memory search "when may I deploy?" --owner ops
    """
    found = await store.search(query, **wanted.arguments(), limit=limit, floor=floor)
    rows = [row for one in found for row in _found_rows(one)]
    shown = table(("id", "score#", "words#", "meaning#", "type", "owner", "source", "text"), rows)
    data = [one.model_dump(mode="json") for one in found]
    return Output(data, shown if rows else StderrText(f"no matching memories in {store.place}"))


def _found_rows(found: FoundMemory) -> Sequence[Sequence[str]]:
    memory = found.memory
    by_words = "-" if found.text_rank is None else f"{found.text_rank}."
    by_meaning = "-" if found.vector_rank is None else f"{found.vector_rank}. ({found.similarity:.2f})"
    ranks = f"{found.score:.5f}", by_words, by_meaning
    first = memory.id, *ranks, memory.type, memory.owner or "-", _short(memory.source) or "-", _short(memory.text)
    notes = [
        (one.id, "", "", "", "", "", _short(one.source) or "-", f"{RELATIONS[one.relation]}: {_short(one.text)}")
        for one in found.related
    ]
    return [first, *notes]


@app.command("list")
@with_memory_store(embeds=False)
async def list_(
    store: HybridStore,
    wanted: MemoryFilter,
    *,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Print at most N memories.")] = 50,
) -> Output:
    """List memories, the newest first.

    The strength decides rank and pruning. Without use it halves in 69 days.

    Example: perdure memory list --owner ops --type rule
    """
    found = await store.list(**wanted.arguments(), limit=limit + 1)
    more = f"more than {limit} memories match: raise --limit to see them, or export them"
    return Output(
        [one.model_dump(mode="json") for one in found[:limit]],
        Table(_COLUMNS, found[:limit]) if found else StderrText(f"no matching memories in {store.place}"),
        notes=[more if len(found) > limit else None],
    )


_SHOWN: Final = 120
"""Characters of a text in a table."""


def _short(text: str) -> str:
    return short(text, _SHOWN)


_COLUMNS: Final[Sequence[Column[Memory]]] = (
    Column("id", lambda memory: memory.id),
    Column("type", lambda memory: memory.type),
    Column("owner", lambda memory: memory.owner or None),
    Column("strength", lambda memory: f"{strength(memory, time.time()):.3f}", right=True),
    Column("uses", lambda memory: memory.accesses, right=True),
    Column("used", lambda memory: Time(round(memory.accessed * 1000))),
    Column("source", lambda memory: _short(memory.source) or None),
    Column("text", lambda memory: _short(memory.text), least=12, fold=True),
)


@app.command()
@with_memory_store(embeds=False)
async def forget(
    store: HybridStore,
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Ids of the memories.")] = None,
    *,
    wanted: MemoryFilter,
    every: Annotated[
        bool, typer.Option("--all", help="Select all memories that match --owner, --type, --tag and --subject.")
    ] = False,
    dry_run: DryRun = False,
) -> Output:
    """Delete memories permanently, and print their ids.

    Example: perdure memory forget 01980f2e-7f6a-7c41-b9a5-7d4f0c1d2e3f
    Example: perdure memory forget --all --owner ops --dry-run
    """
    if bool(ids) == every:
        raise Misuse("give IDs, or --all with --owner, --type, --tag or --subject")
    if every and wanted == MemoryFilter(tenant=wanted.tenant):
        raise Misuse(
            "--all needs --owner, --type, --tag or --subject: to delete everything, delete the file or the tables"
        )
    if every:
        gone = [one.id async for one in store.export(**wanted.arguments())]
    else:
        requested = list(dict.fromkeys(ids or ()))
        found = await store.get(requested, tenant=wanted.own_tenant)
        gone = [one.id for one in found if wanted.full_owner in (None, one.owner)]
        if missing := [one for one in requested if one not in gone]:
            raise Failed(f"no memory {', '.join(missing)} in {store.place}: nothing was deleted")
    for at in range(0, 0 if dry_run else len(gone), 500):
        await store.forget(gone[at : at + 500], owner=wanted.full_owner, tenant=wanted.own_tenant)
    return _gone("forgotten", gone, dry_run)


def _gone(name: str, ids: Sequence[str], dry_run: bool) -> Output:
    done = f"{'would delete' if dry_run else 'deleted'} {len(ids)} memories"
    return Output({name: ids, "dry_run": dry_run}, *ids, notes=[done])


@app.command()
@command
async def export(
    place: StoreOptions,
    wanted: MemoryFilter,
    *,
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
        _salvage(place.settings(), output, wanted)
        return
    async with place.open(embeds=False) as store:
        count = await store.count(**wanted.arguments())
        with (
            Bar("exporting", count, rest="give the command again for a complete file") as bar,
            open_output(output) as file,
        ):
            async for memory in store.export(**wanted.arguments()):
                print_json_lines([memory.model_dump(mode="json")], file)
                bar.advance()
        note(f"exported {bar.done} memories from {store.place}")


def _salvage(settings: Settings, output: Path | None, wanted: MemoryFilter) -> None:
    if is_postgres(settings.memory):
        raise Misuse("--salvage is for a file: for PostgreSQL use its own recovery tools")
    reading = Salvage(store_path(settings))
    with Bar("salvaging", rest=_AGAIN) as bar, open_output(output) as file:
        for memory in filter(wanted.matches, reading):
            print_json_lines([memory.model_dump(mode="json")], file)
            bar.advance()
    note(f"salvaged {bar.done} memories from {store_path(settings)}; unreadable places: {reading.lost}")
    if reading.lost:
        raise typer.Exit(1)


@app.command()
@with_memory_store(embeds=False)
async def prune(
    store: HybridStore,
    wanted: MemoryFilter,
    *,
    below: Annotated[
        float | None,
        typer.Option(min=0, metavar="STRENGTH", help="Delete memories with less strength; 'memory list' shows it."),
    ] = None,
    older_than: Annotated[
        float | None, in_duration("Delete memories that were not used for this time, such as 90d.")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Delete all but the N strongest of each owner and type.")
    ] = None,
    dry_run: DryRun = False,
) -> Output:
    """Delete weak or unused memories, and print their ids, the weakest first.

    A memory is deleted if any of --below, --older-than and --keep selects it.

    Example: perdure memory prune --older-than 365d --keep 1000 --dry-run
    """
    if below is None and older_than is None and keep is None:
        raise Misuse("nothing selects memories: give --below STRENGTH, --older-than DURATION or --keep N")
    policy = Policy(below=below, unused=None if older_than is None else older_than / _DAY, most=keep)
    return _gone("pruned", await store.prune(policy, **wanted.arguments(), dry_run=dry_run), dry_run)


@app.command()
@with_memory_store(reembedding=True)
async def reembed(store: HybridStore) -> Output:
    """Embed all memories with the current embedder.

    Use it after you have set or changed PERDURE_EMBEDDER. Until it has
    finished, search uses the previous vectors. If it is interrupted, the
    next call continues where it stopped.

    Example: perdure memory reembed
    """
    done = 0
    with Bar("embedding", await store.count(), rest="the same command embeds the rest") as bar:
        async for done in store.reembed():
            bar.advance(done - bar.done)
    return Output({"embedded": done}, notes=[f"embedded {done} memories in {store.place}"])


_BATCH: Final = 64

_AGAIN: Final = "give the command again for a complete file"


async def _import_file(
    store: HybridStore, path: str, defaults: Mapping[str, Any], tenant: str | None
) -> dict[str, int]:
    """Store the memories of a file in its order; return the numbers of new and of known ones.

    Args:
        defaults: Values for missing fields of a line.
        tenant: Tenant that all memories must belong to; None for any.
    """
    with opened(path) as file:

        def read(_: int, text: bytes) -> Memory | tuple[NewMemory, str, str | None]:
            return _read(text, defaults, tenant)

        count = check_lines(file, read, "nothing was stored")
        new, started_at = 0, time.time()
        exported: list[Memory] = []
        with Bar("importing", count, rest="the same command stores the rest of exported memories") as bar:
            for line in read_lines(file, read):
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


def _read(text: bytes, defaults: Mapping[str, Any], tenant: str | None) -> Memory | tuple[NewMemory, str, str | None]:
    fields = read_object(text)
    owner = fields.get("owner", defaults["owner"])
    if tenant is not None and not (isinstance(owner, str) and belongs_to(tenant, owner)):
        raise ValueError(
            f"owner must be one of tenant {tenant!r}, such as {owner_of_tenant(tenant, 'ops')!r}, got {owner!r}"
        )
    if "id" in fields:
        return Memory.model_validate(fields)
    fields = {**defaults, **fields}
    owner, key = fields.pop("owner"), fields.pop("key", None)
    if not isinstance(owner, str) or not (key is None or isinstance(key, str)):
        raise ValueError("owner and key must be text")
    return new_memory(**{"text": None, **fields}), owner, key
