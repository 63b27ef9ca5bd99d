"""`perdure store`: list, show and delete entries of the key-value store."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Final, TypeVar

import orjson
import typer

from ...queues.envelope import DEFAULT_LARGE_LIMIT, DEFAULT_PAYLOAD_LIMIT
from ...queues.producer import Producer
from ...queues.store.entries import EntryChange, NamespaceEntries, StoredEntry, check_key, damaged_entry
from ...queues.store.names import Name, StoreNames, read_name, shown_name
from ...queues.wording import iso_time
from .support.connection import connected, where
from .support.errors import Failed
from .support.options import Assured, confirm_deletion, parser
from .support.output import Column, Time, note
from .support.runner import Listing, Output

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True, add_completion=False)

_NAMESPACE: Final = "Name of the namespace, its parts separated by '/'."

NamespaceName = Annotated[Any, typer.Argument(metavar="NAMESPACE", parser=parser(read_name), help=_NAMESPACE)]


@parser
def _read_key(text: str) -> str:
    check_key(text)
    return text


@app.callback()
def store() -> None:
    """List, show and delete entries of the key-value store.

    A namespace such as threads/user-42 is what programs name
    app.store("threads", "user-42").
    """


@app.command("list")
@connected
async def list_(
    producer: Producer,
    name: Annotated[
        Any,
        typer.Argument(metavar="[NAMESPACE]", parser=parser(read_name), help=_NAMESPACE, show_default=False),
    ] = None,
    *,
    prefix: Annotated[
        str, typer.Option(metavar="TEXT", help="Only keys, or first parts of namespaces, that begin with it.")
    ] = "",
    after: Annotated[str, typer.Option(metavar="NAME", help="Continue the list after this key or namespace.")] = "",
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Print at most N rows.")] = 100,
) -> Listing:
    """List the namespaces of the store, or the entries of one, without their values.

    Example: perdure store list threads/user-42 --prefix checkpoint/
    """
    if name is None:
        names = StoreNames(producer.gateway, producer.namespace)
        listed = names.list(after=parser(read_name)(after) if after else ())
        found = await _first((one async for one in listed if one[0].startswith(prefix)), limit)
        data = [{"namespace": shown_name(one), "parts": one} for one in found]
        more = _more(found, limit, shown_name)
        return Listing(_NAMES, found, empty=f"the store has no entries {where(producer)}", data=data, notes=[more])
    entries = _entries(producer, name)
    stored = await _first(entries.scan(prefix, after=after, values=False), limit)
    empty = f"namespace {shown_name(name)!r} has no such entries {where(producer)}"
    more = _more(stored, limit, lambda entry: entry.key)
    return Listing(_ENTRIES, stored, empty=empty, data=[_summary(entry) for entry in stored], notes=[more])


@app.command()
@connected
async def show(
    producer: Producer,
    name: NamespaceName,
    key: Annotated[str, typer.Argument(metavar="KEY", parser=_read_key, help="Key of the entry.")],
) -> Output:
    """Show an entry with its value.

    Example: perdure store show threads/user-42 state
    """
    (entry,) = await _entries(producer, name).read([key])
    if entry is None:
        raise Failed(f"namespace {shown_name(name)!r} has no entry {key!r} {where(producer)}")
    data = entry.data or b""
    if entry.form == "b":
        value = {"base64": b64encode(data).decode()}
        text = f"{len(data):,} bytes; --json prints them in base64"
    else:
        try:
            value = orjson.loads(data)
        except ValueError:
            raise damaged_entry(key, shown_name(name)) from None
        text = orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
    fields = {name.replace("_", " "): field for name, field in _fields(entry).items()}
    return Output(_summary(entry) | {"value": value}, fields, text)


@app.command()
@connected
async def delete(
    producer: Producer,
    name: NamespaceName,
    key: Annotated[
        str, typer.Argument(metavar="[KEY]", help="Key of the entry; else all entries.", show_default=False)
    ] = "",
    *,
    assured: Assured = False,
) -> None:
    """Delete an entry, or all entries of a namespace.

    Example: perdure store delete threads/user-42
    """
    shown = f"namespace {shown_name(name)!r}"
    entries = _entries(producer, name)
    if key:
        (entry,) = await entries.read([key])
        there = entry is not None
    else:
        there = bool(await _first(entries.scan(limit=1, values=False), 1))
    if not there:
        raise Failed(f"{shown} has no {f'entry {key!r}' if key else 'entries'} {where(producer)}")
    what = f"entry {key!r} of {shown}" if key else f"all entries of {shown}"
    if not assured:
        confirm_deletion(what, "deletes entries")
    await entries.write([EntryChange("delete", key) if key else EntryChange("prefix", "")])
    note(f"deleted {what}")


async def _first(items: AsyncIterator[T], limit: int) -> list[T]:
    found: list[T] = []
    async with aclosing(items) as open_items:  # type: ignore[type-var]
        async for item in open_items:
            found.append(item)
            if len(found) == limit:
                break
    return found


def _more(found: Sequence[T], limit: int, name: Any) -> str | None:
    return f"there may be more: continue with --after {name(found[-1])}" if len(found) == limit else None


def _entries(producer: Producer, name: Name) -> NamespaceEntries:
    names = StoreNames(producer.gateway, producer.namespace)
    limits = {"payload_limit": DEFAULT_PAYLOAD_LIMIT, "limit": DEFAULT_LARGE_LIMIT}
    return NamespaceEntries(producer.gateway, producer.namespace, name, names, **limits)


def _fields(entry: StoredEntry) -> dict[str, Any]:
    return {
        "key": entry.key,
        "version": entry.version,
        "updated": Time(entry.version),
        "expires": Time(entry.expires) if entry.expires else None,
        "form": "bytes" if entry.form == "b" else "JSON",
    }


def _summary(entry: StoredEntry) -> dict[str, Any]:
    return {
        "key": entry.key,
        "version": entry.version,
        "updated_at": iso_time(entry.version),
        "expires_at": iso_time(entry.expires) if entry.expires else None,
        "form": "bytes" if entry.form == "b" else "json",
    }


_NAMES: Final[Sequence[Column[Name]]] = (Column("namespace", shown_name, least=12, fold=True),)

_ENTRIES: Final[Sequence[Column[StoredEntry]]] = (
    Column("key", lambda entry: entry.key, least=12, fold=True),
    Column("version", lambda entry: entry.version, right=True),
    Column("updated", lambda entry: Time(entry.version)),
    Column("expires", lambda entry: Time(entry.expires) if entry.expires else None),
    Column("form", lambda entry: "bytes" if entry.form == "b" else "JSON"),
)
