"""The store of LangGraph: items by namespace and key, in the key-value store.

Each namespace of LangGraph is a namespace of the key-value store, so that a search reads those below its prefix. Search
by meaning compares the query with the vectors of all items that it reads.
"""

from __future__ import annotations

import asyncio
import base64
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

from langgraph.store.base import (
    BaseStore,
    GetOp,
    IndexConfig,
    Item,
    ListNamespacesOp,
    MatchCondition,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
    TTLConfig,
    ensure_embeddings,
    get_text_at_path,
    tokenize_path,
    validate_op_namespace,
)

from ....queues.errors import StoreConflict
from ....queues.keys import check_name
from ...app import App
from .checkpoints import part
from .store_calls import call_blocking, check_fence

if TYPE_CHECKING:
    from ...store import Store

T = TypeVar("T")

Namespace = tuple[str, ...]

_ROOT: Final = "$"
"""Path of the whole value."""


class PerdureStore(BaseStore):
    """A store for LangGraph: `builder.compile(store=PerdureStore(app))`.

    It needs an open app (`async with app:`, or a worker), and no module of Redis. Inside a task of Perdure its writes
    are fenced by the task. Outside they are not, which it logs once at WARNING. The synchronous methods are for threads
    without an event loop. A search reads all items below its prefix, and returns those changed last first.
    """

    supports_ttl = True

    def __init__(
        self,
        app: App,
        *,
        name: str = "langgraph-items",
        index: IndexConfig | None = None,
        ttl: TTLConfig | None = None,
        require_task: bool = False,
    ) -> None:
        """Create a store of an app.

        Args:
            name: of the items in the key-value store, whose namespaces are `(name, *namespace)`.
            index: LangGraph's configuration of search by meaning: `embed`, `dims` and `fields`.
            ttl: LangGraph's configuration of expiry: `default_ttl` in minutes, `refresh_on_read`.
            require_task: refuse writes outside a task.
        """
        self._app = app
        self._name = check_name("name of a store", name)
        self._require_task = require_task
        self.ttl_config = ttl
        self.index_config = index
        self.embeddings = None if index is None else ensure_embeddings(index.get("embed"))
        fields = (index.get("fields") if index else None) or [_ROOT]
        self._fields = [(path, _tokens(path)) for path in fields]

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """See `abatch`."""
        listed = list(ops)
        return call_blocking(self._app, lambda: self.abatch(listed), "await store.abatch(...)")

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """Execute operations, reads before writes. The last of several writes of one item counts.

        The writes of one namespace are one atomic batch.

        Raises `InvalidNamespaceError`, a `ValueError` of LangGraph, for labels of a namespace that are not valid.
        """
        listed = list(ops)
        for op in listed:
            validate_op_namespace(op)
        puts = {(op.namespace, op.key): op for op in listed if isinstance(op, PutOp)}
        if puts:
            check_fence(f"items {self._name!r}", require=self._require_task)
        results = await asyncio.gather(*(self._read(op) for op in listed))
        by_namespace: dict[Namespace, list[PutOp]] = {}
        for op in puts.values():
            by_namespace.setdefault(op.namespace, []).append(op)
        vectors = await self._embed(list(puts.values()))
        await asyncio.gather(*(self._write(where, some, vectors) for where, some in by_namespace.items()))
        return list(results)

    def _store(self, namespace: Namespace) -> Store:
        return self._app.store(self._name, *namespace)

    async def _read(self, op: Op) -> Result:
        if isinstance(op, GetOp):
            return await self._get(op)
        if isinstance(op, SearchOp):
            return await self._search(op)
        if isinstance(op, ListNamespacesOp):
            return await self._list_namespaces(op)
        return None

    async def _get(self, op: GetOp) -> Item | None:
        store = self._store(op.namespace)
        entry = await store.entry(part(op.key))
        if entry is None:
            return None
        found = _Stored.of(op.namespace, entry)
        if op.refresh_ttl:
            await found.refresh(store)
        return found.item()

    async def _search(self, op: SearchOp) -> list[SearchItem]:
        query = None
        if op.query and self.embeddings is not None:
            query = await self.embeddings.aembed_query(op.query)
        found: list[_Stored] = []
        async for namespace in self._app.store.namespaces(prefix=(self._name, *op.namespace_prefix)):
            place = namespace[1:]
            async for entry in self._store(place).list():
                stored = _Stored.of(place, entry)
                if not op.filter or all(_fits(stored.value.get(name), asked) for name, asked in op.filter.items()):
                    found.append(stored)
        found.sort(key=lambda stored: stored.updated, reverse=True)
        scores: dict[int, float] = {}
        if query is not None:
            pairs = ((number, stored.score(query)) for number, stored in enumerate(found))
            scores = {number: score for number, score in pairs if score is not None}
            order = sorted(range(len(found)), key=lambda number: -scores.get(number, -math.inf))
        else:
            order = list(range(len(found)))
        chosen = order[op.offset : op.offset + op.limit]
        if op.refresh_ttl:
            await asyncio.gather(*(found[number].refresh(self._store(found[number].namespace)) for number in chosen))
        return [found[number].search_item(scores.get(number)) for number in chosen]

    async def _list_namespaces(self, op: ListNamespacesOp) -> list[Namespace]:
        found: set[Namespace] = set()
        async for namespace in self._app.store.namespaces(prefix=(self._name,)):
            place = namespace[1:]
            if all(_matches(condition, place) for condition in op.match_conditions or ()):
                found.add(place if op.max_depth is None else place[: op.max_depth])
        return sorted(found)[op.offset : op.offset + op.limit]

    async def _write(
        self, namespace: Namespace, ops: Sequence[PutOp], vectors: Mapping[tuple[Namespace, str], dict[str, str]]
    ) -> None:
        store = self._store(namespace)
        known = await store.get_many([part(op.key) for op in ops if op.value is not None])
        now = datetime.now(UTC).isoformat()
        async with store.batch() as batch:
            for op in ops:
                key = part(op.key)
                if op.value is None:
                    batch.delete(key)
                    continue
                former = known.get(key)
                data: dict[str, Any] = {"key": op.key, "value": op.value, "updated": now}
                data["created"] = now if former is None else former["created"]
                if found := vectors.get((namespace, op.key)):
                    data["vectors"] = found
                seconds = None
                if op.ttl is not None:
                    data["ttl"] = seconds = op.ttl * 60
                batch.put(key, data, ttl=seconds)

    async def _embed(self, ops: Sequence[PutOp]) -> dict[tuple[Namespace, str], dict[str, str]]:
        """Return the vectors of items by their paths."""
        places: list[tuple[PutOp, str]] = []
        texts: list[str] = []
        for op in ops:
            if self.embeddings is None or op.value is None or op.index is False:
                continue
            fields = self._fields if op.index is None else [(path, _tokens(path)) for path in op.index]
            for path, tokens in fields:
                for number, text in enumerate(get_text_at_path(op.value, tokens)):
                    places.append((op, f"{path}.{number}"))
                    texts.append(text)
        found: dict[tuple[Namespace, str], dict[str, str]] = {}
        if self.embeddings is not None and texts:
            for (op, path), vector in zip(places, await self.embeddings.aembed_documents(texts), strict=True):
                found.setdefault((op.namespace, op.key), {})[path] = _encode_vector(vector)
        return found


@dataclass(slots=True)
class _Stored:
    """An item as it is stored."""

    namespace: Namespace
    entry: Any

    @classmethod
    def of(cls, namespace: Namespace, entry: Any) -> _Stored:
        return cls(tuple(namespace), entry)

    @property
    def value(self) -> dict[str, Any]:
        value: dict[str, Any] = self.entry.value["value"]
        return value

    @property
    def updated(self) -> str:
        return str(self.entry.value["updated"])

    def _fields(self) -> dict[str, Any]:
        data = self.entry.value
        times = {f"{name}_at": datetime.fromisoformat(data[name]) for name in ("created", "updated")}
        return {"namespace": self.namespace, "key": data["key"], "value": data["value"], **times}

    def item(self) -> Item:
        return Item(**self._fields())

    def search_item(self, score: float | None) -> SearchItem:
        return SearchItem(**self._fields(), score=score)

    def score(self, query: Sequence[float]) -> float | None:
        """Return the similarity of the nearest of its vectors; None if it has none."""
        vectors = self.entry.value.get("vectors") or {}
        return max((_cosine(query, _decode_vector(text)) for text in vectors.values()), default=None)

    async def refresh(self, store: Store) -> None:
        """Let an item that expires expire later, unless it has changed."""
        seconds = self.entry.value.get("ttl")
        if seconds is not None:
            with suppress(StoreConflict):
                await store.put(self.entry.key, self.entry.value, ttl=seconds, expected=self.entry.version)


def _tokens(path: str) -> Any:
    return path if path == _ROOT else tokenize_path(path)


def _encode_vector(vector: Iterable[float]) -> str:
    return base64.b64encode(array("f", vector).tobytes()).decode()


def _decode_vector(text: str) -> array[float]:
    found = array("f")
    found.frombytes(base64.b64decode(text))
    return found


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    length = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=False)) / length if length else 0.0


_OPERATORS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "$eq": lambda value, asked: bool(value == asked),
    "$ne": lambda value, asked: bool(value != asked),
    "$gt": lambda value, asked: float(value) > float(asked),
    "$gte": lambda value, asked: float(value) >= float(asked),
    "$lt": lambda value, asked: float(value) < float(asked),
    "$lte": lambda value, asked: float(value) <= float(asked),
}


def _fits(value: Any, asked: Any) -> bool:
    """Return whether a value fits what a filter asks for: an equal value, or operators such as `{"$gte": 3}`.

    Raises `ValueError` for an unknown operator.
    """
    if isinstance(asked, Mapping):
        if any(str(name).startswith("$") for name in asked):
            return all(_compare(value, name, operand) for name, operand in asked.items())
        return isinstance(value, Mapping) and all(_fits(value.get(name), inner) for name, inner in asked.items())
    if isinstance(asked, (list, tuple)):
        return isinstance(value, (list, tuple)) and len(value) == len(asked) and all(map(_fits, value, asked))
    return bool(value == asked)


def _compare(value: Any, operator: str, operand: Any) -> bool:
    compare = _OPERATORS.get(operator)
    if compare is None:
        raise ValueError(f"operator of a filter must be one of {', '.join(_OPERATORS)}, got {operator!r}")
    try:
        return compare(value, operand)
    except (TypeError, ValueError):  # no number, which nothing is compared with
        return False


def _matches(condition: MatchCondition, namespace: Namespace) -> bool:
    path, found = condition.path, namespace
    if len(found) < len(path):
        return False
    pairs: Iterator[tuple[str, str]] = zip(found, path, strict=False)
    if condition.match_type == "suffix":
        pairs = zip(reversed(found), reversed(path), strict=False)
    return all(label in ("*", part) for part, label in pairs)
