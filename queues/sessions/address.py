"""Names of sessions and turns, and the keys of a session."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

import orjson

from ..keys import SESSION_PARTITIONS, Namespace, Partition, SessionPartition
from ..security.encryption import TaskCipher
from ..transport.gateway import Gateway

_LONGEST: Final = 256
"""Most characters of a session id."""

_DIGEST: Final = re.compile(r"[0-9a-f]{32}")
_TURN: Final = re.compile(r"turn-([0-9a-f]{32})-([0-9]{1,16})\.([0-9]{1,15})(?:\.h[0-9]+)?")


@dataclass(frozen=True, slots=True)
class TurnId:
    """Parsed task id of a turn. born: time of the first message of its session (ms), as text."""

    digest: str
    born: str
    number: int

    def __str__(self) -> str:
        return f"turn-{self.digest}-{self.born}.{self.number}"


def check_session_id(session_id: str) -> str:
    """Return a valid session id. Raises `ValueError` with the rule for any other, `TypeError` if it is no text."""
    if not isinstance(session_id, str):
        raise TypeError(f"session id must be a text, got {session_id!r}")
    if not 1 <= len(session_id) <= _LONGEST or not session_id.isprintable():
        raise ValueError(f"session id must be 1 to {_LONGEST} printable characters, got {session_id!r}")
    return session_id


def is_digest(text: str) -> bool:
    """Return whether a text may be the digest of a session."""
    return _DIGEST.fullmatch(text) is not None


def parse_turn_id(task_id: str) -> TurnId | None:
    """Return the turn whose task, or successor of a task, has this id; None for the id of another task."""
    found = _TURN.fullmatch(task_id)
    return None if found is None else TurnId(found[1], found[2], int(found[3]))


@dataclass(frozen=True, slots=True)
class SessionAddress:
    """Keys of a session, by the digest of the name of its agent and its id."""

    partition: SessionPartition
    digest: str

    @classmethod
    def of(cls, namespace: Namespace, agent: str, session_id: str) -> SessionAddress:
        """Return the address of a session. Raises `ValueError` for an invalid id."""
        digest = hashlib.sha256(orjson.dumps([agent, check_session_id(session_id)])).hexdigest()[:32]
        return cls.at(namespace, digest)

    @classmethod
    def at(cls, namespace: Namespace, digest: str) -> SessionAddress:
        """Return the address of a session by its digest."""
        return cls(SessionPartition(namespace.name, int(digest[:4], 16) % SESSION_PARTITIONS), digest)

    @property
    def session(self) -> str:
        return self.partition.session(self.digest)

    @property
    def history(self) -> str:
        return self.partition.history(self.digest)

    @property
    def keys(self) -> list[str]:
        """Keys of the scripts: session, history, due, timeline."""
        return [self.session, self.history, self.partition.due, self.partition.timeline]

    def cipher(self, gateway: Gateway) -> TaskCipher:
        """Return the cipher of the session's data."""
        return gateway.encryptor.of(Partition(self.partition.namespace, "~sessions", 0), self.digest)
