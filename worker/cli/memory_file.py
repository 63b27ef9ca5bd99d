"""Memories from a file of JSON lines: all lines are checked before the first memory is stored.

    {"text": "Deploys are frozen on Fridays", "type": "rule", "owner": "ops", "tags": [], "metadata": {},
     "source": "", "importance": 0.5, "key": null}

A line with an id is one that was exported: it is stored as it was, with its times and counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import IO, Any

from pydantic import ValidationError

from ..memory import HybridStore, InvalidMemory, Memory, NewMemory, new_memory
from .batch import opened, problem
from .failures import Failed, Misuse
from .parameters import read_object
from .progress import Bar

__all__ = ["take_in"]

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
