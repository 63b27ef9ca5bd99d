"""What goes wrong in PostgreSQL, told in our errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg

from .errors import MemoryStoreDamaged, MemoryStoreUnavailable

__all__ = ["told"]


@asynccontextmanager
async def told(store: str, wait: float) -> AsyncIterator[None]:
    """wait: seconds for which others may hold a lock."""
    try:
        yield
    except psycopg.errors.LockNotAvailable as error:
        raise MemoryStoreUnavailable(
            store, f"another process has held a lock for {wait:g} s: try again, or find who (pg_locks)"
        ) from error
    except (psycopg.errors.DataCorrupted, psycopg.errors.IndexCorrupted) as error:
        raise MemoryStoreDamaged(store, _line(error)) from error
    except psycopg.OperationalError as error:
        raise MemoryStoreUnavailable(store, f"cannot be reached: {_line(error)}") from error
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidSchemaName) as error:
        raise MemoryStoreUnavailable(store, f"its user may not: {_line(error)}") from error
    except psycopg.ProgrammingError as error:
        if error.sqlstate is not None:  # the server's, of our own statements: a bug
            raise
        raise MemoryStoreUnavailable(store, f"its URL cannot be read: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
