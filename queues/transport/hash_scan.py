"""Pages of the fields of a hash, complete also if another server process answers for the later ones.

Each server process puts the fields of a hash in another order, so a cursor of HSCAN means nothing to the server that
answers after a restart, a failover or a resharding: it would leave out fields. So each page is read together with the
`run_id` of the server (https://redis.io/docs/latest/commands/info/), and if that has changed, the scan starts again.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from .gateway import Gateway
from .scripts import pairs, queue_script

_PAGE: Final = queue_script("hash_page")


class ScanCursor(NamedTuple):
    """Position of a scan. process: `run_id` of the server, empty if it is unknown."""

    process: bytes
    position: bytes

    @property
    def is_end(self) -> bool:
        """Whether all fields have been read. A scan at its start is not."""
        return self.position == b"0"


SCAN_START: Final = ScanCursor(b"", b"")


async def scan_page(
    gateway: Gateway, key: str, cursor: ScanCursor, pattern: str, count: int
) -> tuple[ScanCursor, dict[bytes, bytes]]:
    """Return the next cursor, and the fields of a page. A field may be in several pages.

    count: number of fields of the hash that the server looks at.
    """
    process, position, found = await gateway.run(_PAGE, [key], [cursor.position or 0, pattern, count])
    if cursor.position and process != cursor.process:
        return SCAN_START, {}
    return ScanCursor(process, position), pairs(found)
