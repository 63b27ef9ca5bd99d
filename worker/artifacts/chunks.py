"""Artifact data as a stream of chunks, so that a large file is never in memory as a whole."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import IO, Any, Final

import anyio.to_thread

from ...queues.regular_files import open_regular
from ..errors import ArtifactError

CHUNK: Final = 1 << 20
"""Size of a read or write in bytes."""

Data = bytes | bytearray | memoryview | str | Path | IO[bytes] | AsyncIterator[bytes]
"""Bytes; text, saved as UTF-8; a `Path` of a regular file; an open binary file, sync or async; a stream of bytes."""


async def chunks_of(what: str, data: Data) -> AsyncGenerator[bytes | memoryview, None]:
    """Yield the data in chunks. what: names the artifact in errors. Raises `ArtifactError`."""
    if isinstance(data, str):
        data = data.encode()
    if isinstance(data, bytes | bytearray | memoryview):
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK):
            yield view[start : start + CHUNK]
    elif isinstance(data, Path):
        file = await _in_thread(what, data, open_regular, data)
        try:
            while chunk := await _in_thread(what, data, file.read, CHUNK):
                yield chunk
        finally:
            file.close()
    elif isinstance(data, AsyncIterator):
        async for chunk in data:
            yield _checked(what, chunk)
    elif callable(read := getattr(data, "read", None)):
        while chunk := await _read(what, data, read):
            yield _checked(what, chunk)
    else:
        raise ArtifactError(
            f"{what}: data must be bytes, text, a Path, a binary file or an async iterator of bytes, "
            f"got {type(data).__name__}"
        )


async def _read(what: str, data: Any, read: Any) -> Any:
    if inspect.iscoroutinefunction(read):
        return await read(CHUNK)
    chunk = await _in_thread(what, data, read, CHUNK)
    return await chunk if inspect.isawaitable(chunk) else chunk


async def _in_thread(what: str, data: Any, function: Any, *args: Any) -> Any:
    """Call a method of a file in a thread. A failure is blamed on the data, not on the store."""
    try:
        return await anyio.to_thread.run_sync(function, *args)
    except (OSError, ValueError) as error:
        named = data if isinstance(data, Path) else getattr(data, "name", data)
        problem = getattr(error, "strerror", None) or error
        raise ArtifactError(f"{what}: could not read {str(named)!r}: {problem}") from error


def _checked(what: str, chunk: object) -> bytes | memoryview:
    if not isinstance(chunk, bytes | bytearray | memoryview):
        raise ArtifactError(f"{what}: data must come as bytes, got {type(chunk).__name__}; open files with 'rb'")
    return chunk if isinstance(chunk, bytes) else memoryview(chunk).cast("B")
