"""Rolling deployments: workers of two releases at once, each with scripts and a version of the tasks of its own.

The scripts of a later release differ in a comment, so a server has them under other digests. A task that a worker of a
later release has started waits for such a worker.
"""

from __future__ import annotations

import re
from functools import cache
from hashlib import sha1
from typing import TYPE_CHECKING, Final

from perdure.queues.transport.scripts import loaded_scripts
from perdure.worker.durable.journal.step_record import VERSION

if TYPE_CHECKING:
    from ..app import Entry
    from ..loop import Machine
    from ..plan import Fault
    from ..world import Process, World

__all__ = ["LATEST", "check_release", "deploy", "in_releases", "own_library"]

LATEST: Final = 3
"""Releases of a run at most."""

_HEADER: Final = b"-- KEYS"
_HEADERS: Final = {2: b"-- Keys", 3: b"-- keys"}
"""Replaces the header in the scripts of later releases, with the same length: the size of a command stays the same."""

_DIGEST: Final = re.compile(rb"\$40\r\n([0-9a-f]{40})\r\n")

_FIELD: Final = b"s:" + VERSION.encode()


@cache
def _digests() -> dict[bytes, dict[int, bytes]]:
    """Return the digests of each script by release, by the digest of the first."""
    found = {}
    for script in loaded_scripts():
        sources = {release: script.source.encode().replace(_HEADER, header) for release, header in _HEADERS.items()}
        later = {number: sha1(source, usedforsecurity=False).hexdigest() for number, source in sources.items()}
        found[script.sha.encode()] = {number: digest.encode() for number, digest in later.items()}
    return found


def in_releases(digest: bytes) -> frozenset[bytes]:
    """Return the digests of a script in all releases. digest: in the first one."""
    return frozenset({digest, *_digests()[digest].values()})


def own_library(world: World, machine: Machine, data: bytes) -> bytes:
    """Return commands of a worker with the scripts of its release."""
    release = world.release_of(machine)
    if release == 1:
        return data
    known = _digests()

    def digest(found: re.Match[bytes]) -> bytes:
        return found[0] if (later := known.get(found[1])) is None else b"$40\r\n%b\r\n" % later[release]

    return _DIGEST.sub(digest, data.replace(_HEADER, _HEADERS[release]))


async def deploy(world: World, fault: Fault) -> None:
    """Start a worker of the next release; the others are replaced later. Each that starts from now on has it."""
    world.release = min(world.release + 1, LATEST)
    world.tell(f"release {world.release} is deployed")
    world.start_worker()
    world.later(fault.size, lambda: _replace_workers(world))


def _replace_workers(world: World) -> None:
    """Stop all workers of earlier releases; their init system starts later ones."""
    for host in [one for one in world.hosts if one.release < world.release]:
        host.stop()
    for process in [one for one in world.processes if one.release < world.release and one.host is None]:
        if process.worker is None:
            world.end(process)
            world.later(0.1, world.start_worker)
        else:
            world.signal(process)


def check_release(world: World, process: Process, entry: Entry) -> None:
    """Check that no worker runs a task that a worker of a later release has started."""
    if not world.is_healthy(process):
        return
    for key, item in world.server.items.items():
        if key.endswith(b":steps:" + entry.task.encode()):
            version = int(item.value._values.get(_FIELD, b"1"))
            if version > process.release:
                world.checks.add("older code", f"{process.name} of release {process.release} runs {entry.task}")
