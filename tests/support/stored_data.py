"""All data of a namespace as a reader of a backup would see it, and encryption keys for tests."""

from __future__ import annotations

from typing import Any

from perdure import App, Settings
from pydantic import SecretStr

from tests.support.workers import redis_command

FIRST = "Zmlyc3QgZmlyc3QgZmlyc3QgZmlyc3QgZmlyc3QgISE="
SECOND = "c2Vjb25kIHNlY29uZCBzZWNvbmQgc2Vjb25kICEhISE="

_READ: dict[bytes, tuple[str | int, ...]] = {
    b"string": ("GET",),
    b"hash": ("HGETALL",),
    b"stream": ("XRANGE", "-", "+"),
    b"zset": ("ZRANGE", 0, -1, "WITHSCORES"),
    b"set": ("SMEMBERS",),
    b"list": ("LRANGE", 0, -1),
}


def with_keys(settings: Settings, *keys: str, required: bool = False) -> Settings:
    """Return the settings with encryption keys."""
    return settings.model_copy(
        update={"encryption_keys": SecretStr(",".join(keys)), "encryption_required": required},
    )


async def everything(app: App) -> bytes:
    """Return all keys of the namespace and their values as one text."""
    name = app.producer.namespace.name
    found: list[Any] = []
    for pattern in (f"{{{name}:*", f"{{{name}}}:*"):
        cursor = b"0"
        while True:
            cursor, keys = await redis_command(app, "SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            for key in keys:
                kind = await redis_command(app, "TYPE", key)
                if kind == b"none":  # it has expired since
                    continue
                command, *rest = _READ[kind]
                found += [key, await redis_command(app, command, key, *rest)]
            if int(cursor) == 0:
                break
    return b"\n".join(_flat(found))


def _flat(value: Any) -> list[bytes]:
    if isinstance(value, list):
        return [part for one in value for part in _flat(one)]
    return [value if isinstance(value, bytes) else str(value).encode()]
