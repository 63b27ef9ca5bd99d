"""What can be saved, as a stream of bytes: a large file is never in memory as a whole."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any, Final

import anyio.to_thread

from ..errors import ArtifactError

__all__ = ["CHUNK", "Data", "chunks_of"]

CHUNK: Final = 1 << 20
"""Bytes that are read or written at once."""

Data = bytes | bytearray | memoryview | str | Path | IO[bytes] | AsyncIterator[bytes]
"""Bytes; text, which is saved in UTF-8; a file by its `Path`; a binary file that is open, sync or async; a stream."""


async def chunks_of(what: str, data: Data) -> AsyncIterator[bytes | memoryview]:
    """The bytes of it, a piece at a time. what: names the artifact in errors. Raises `ArtifactError`."""
    if isinstance(data, str):
        data = data.encode()
    if isinstance(data, bytes | bytearray | memoryview):
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK):
            yield view[start : start + CHUNK]
    elif isinstance(data, Path):
        file = await _in_thread(what, data, data.open, "rb")
        try:
            while chunk := await _in_thread(what, data, file.read, CHUNK):
                yield chunk
        finally:
            file.close()
    elif isinstance(data, AsyncIterator):
        async for piece in data:
            yield _checked(what, piece)
    elif callable(read := getattr(data, "read", None)):
        while piece := await _read(what, data, read):
            yield _checked(what, piece)
    else:
        raise ArtifactError(
            f"{what}: a {type(data).__name__} cannot be saved: give bytes, text, a Path, a binary file or an async "
            "iterator of bytes"
        )


async def _read(what: str, data: Any, read: Any) -> Any:
    if inspect.iscoroutinefunction(read):
        return await read(CHUNK)
    piece = await _in_thread(what, data, read, CHUNK)
    return await piece if inspect.isawaitable(piece) else piece


async def _in_thread(what: str, data: Any, function: Any, *args: Any) -> Any:
    """Files are read in a thread. What fails is the data's fault, and not the store's."""
    try:
        return await anyio.to_thread.run_sync(function, *args)
    except (OSError, ValueError) as error:
        named = data if isinstance(data, Path) else getattr(data, "name", data)
        raise ArtifactError(f"{what}: {str(named)!r} cannot be read: {error}") from error


def _checked(what: str, piece: object) -> bytes | memoryview:
    if not isinstance(piece, bytes | bytearray | memoryview):
        raise ArtifactError(
            f"{what}: its data came as {type(piece).__name__}, and bytes are wanted: open files with 'rb'"
        )
    return piece if isinstance(piece, bytes) else memoryview(piece).cast("B")
