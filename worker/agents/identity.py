"""Identity of an agent: who it is and what it must keep to, apart from the state of its work.

It is stored per agent in versions, and changes only by an explicit act: `perdure identity set`, or `set_identity`. A
run reads it at its start. An agent takes part if its class has an `identity`, which holds until one is stored.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Final

import orjson
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from ...queues.keys import Namespace, Partition
from ...queues.security.encryption import TaskCipher
from ...queues.transport.gateway import Gateway
from ...queues.transport.scripts import pairs, queue_script
from ..errors import IdentityConflict, IdentityError

_SET: Final = queue_script("set_identity")

KEPT: Final = 100
"""Number of versions that are kept."""

_LIMIT: Final = 64 * 1024
"""Largest identity in bytes: it is a part of each prompt."""


class Identity(BaseModel):
    """Description of an agent, apart from its work.

    Attributes:
        role: What the agent is, in a few sentences.
        policies: Rules that it keeps to, in every task.
        parameters: Values that its code reads, such as limits.
        goals: Long-term goals, beyond a single task.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: str = ""
    policies: tuple[str, ...] = ()
    parameters: dict[Annotated[str, Field(min_length=1, max_length=200)], JsonValue] = {}
    goals: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the form for a model. It has no parameters: those are for code."""
        parts = [self.role.strip()] if self.role.strip() else []
        if self.policies:
            parts.append("# Policies\n\n" + "\n".join(f"- {policy}" for policy in self.policies))
        if self.goals:
            parts.append("# Long-term goals\n\n" + "\n".join(f"- {goal}" for goal in self.goals))
        return "\n\n".join(parts)


class IdentityVersion(BaseModel):
    """Stored identity.

    Attributes:
        version: Number from 1; 0 for the one of the agent's class.
        at: Time of the change in milliseconds, by the Redis clock.
        by: Who changed it.
        why: Reason of the change.
    """

    model_config = ConfigDict(frozen=True)

    identity: Identity
    version: int = 0
    at: int | None = None
    by: str = ""
    why: str = ""

    @property
    def changed(self) -> datetime | None:
        """When it was changed."""
        return None if self.at is None else datetime.fromtimestamp(self.at / 1000, UTC)


async def load_identity(
    gateway: Gateway, namespace: Namespace, agent: str, version: int | None = None
) -> IdentityVersion | None:
    """Return a stored identity of an agent, the last one without `version`; None if it is not stored.

    Raises `IdentityError`, `DecryptionError`.
    """
    key, cipher = namespace.identity(agent), _cipher(gateway, namespace, agent)
    if version is not None:
        data, meta = await gateway.command("HMGET", key, f"v:{version}", f"m:{version}")
        return None if data is None else _decode(cipher, agent, version, data, meta or b"")
    last = await gateway.command("HGET", key, "version")
    while last is not None:
        fields = (f"v:{int(last)}", f"m:{int(last)}", f"v:{int(last) + 1}", "version")
        data, meta, newer, last_now = await gateway.command("HMGET", key, *fields)
        if last_now == last and newer is not None:
            problem = f"version {int(last) + 1} is stored, and the counter is {int(last)}"
            raise IdentityError(f"could not read the identity of agent {agent!r}: {problem}")
        if last_now == last:
            return _decode(cipher, agent, int(last), data or b"", meta or b"")
        last = last_now  # another version was stored meanwhile
    return None


async def identity_versions(gateway: Gateway, namespace: Namespace, agent: str) -> list[IdentityVersion]:
    """Return the stored versions of an agent's identity, the oldest first.

    Raises `IdentityError`, `DecryptionError`.
    """
    cipher = _cipher(gateway, namespace, agent)
    fields = pairs(await gateway.command("HGETALL", namespace.identity(agent)))
    numbers = sorted(int(name[2:]) for name in fields if name.startswith(b"v:"))
    stored = [(number, fields[b"v:%d" % number], fields.get(b"m:%d" % number, b"")) for number in numbers]
    return [_decode(cipher, agent, *one) for one in stored]


async def set_identity(
    gateway: Gateway,
    namespace: Namespace,
    agent: str,
    identity: Identity,
    *,
    expected: int | None = None,
    by: str = "",
    why: str = "",
) -> int:
    """Store an identity; return its version. One that is equal to the last makes no new version.

    Args:
        expected: The version that is to be changed, 0 for none; None for any.
        by, why: Who changes it, and the reason; kept with the version.

    Raises:
        IdentityConflict: Another version is stored than the expected one.
        IdentityError: The identity has more than 64 KiB.
        DecryptionError: The last version cannot be decrypted.
    """
    data = orjson.dumps(identity.model_dump(mode="json"), option=orjson.OPT_SORT_KEYS)
    if len(data) > _LIMIT:
        raise IdentityError(
            f"the identity of agent {agent!r} must have at most {_LIMIT:,} bytes, got {len(data):,}: shorten it, since "
            "each prompt has it"
        )
    cipher, key = _cipher(gateway, namespace, agent), namespace.identity(agent)
    change = orjson.dumps({"by": by[:200], "why": why[:2000]})
    while True:
        known = int(await gateway.command("HGET", key, "version") or 0)
        found = None
        with suppress(IdentityError):  # a damaged one may be replaced
            found = await load_identity(gateway, namespace, agent)
        known = known if found is None else found.version
        equal = found is not None and found.identity == identity
        if expected is not None and expected != known and not (equal and expected == known - 1):
            raise IdentityConflict(agent, expected, known)
        if equal:
            return known
        sealed = cipher.encrypt(_identity_field(known + 1), data), cipher.encrypt(_change_field(known + 1), change)
        stored, version = await gateway.run(_SET, [key], [str(known), *sealed, KEPT])
        if stored:
            return int(version)


def _cipher(gateway: Gateway, namespace: Namespace, agent: str) -> TaskCipher:
    return gateway.encryptor.of(Partition(namespace.name, "~identities", 0), agent)


def _identity_field(version: int) -> str:
    """Return the kind of an identity, which cannot be decrypted as another version."""
    return f"identity:{version}"


def _change_field(version: int) -> str:
    """Return the kind of who changed an identity, and why."""
    return f"change:{version}"


def _decode(cipher: TaskCipher, agent: str, version: int, data: bytes, meta: bytes) -> IdentityVersion:
    try:
        at, _, more = meta.partition(b" ")
        known = orjson.loads(cipher.decrypt(_change_field(version), more)) if more else {}
        identity = Identity.model_validate_json(cipher.decrypt(_identity_field(version), data))
        changed = int(at) if at else None
        return IdentityVersion(
            identity=identity, version=version, at=changed, by=known.get("by", ""), why=known.get("why", "")
        )
    except (ValidationError, ValueError, AttributeError) as error:
        raise IdentityError(f"could not read version {version} of the identity of agent {agent!r}: {error}") from None
