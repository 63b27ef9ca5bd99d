"""Users of the API and the dashboard: names, roles, and the file of their tokens.

A token file is TOML with one table per token. It holds hashes, so who reads it cannot use the tokens:

    [[token]]
    name = "shop"
    roles = ["producer"]
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    tenant = "acme"

Without `tenant`, the user sees and makes the tasks of all tenants.
The file is read again when it changes. `perdure web token` adds a token.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tomllib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from pydantic_core import to_json

from ...queues.errors import ConfigurationError
from ...queues.keys import check_tenant
from ...queues.private_files import open_private, replaced_file
from ...queues.regular_files import read_regular
from ..log import logger


class Role(StrEnum):
    """Role of a user. A user may have several.

    producer: enqueues tasks; reads and cancels its own.
    viewer: reads everything; secret values are masked.
    operator: viewer and producer; changes tasks, dead letters, queues, limits, schedules, workers, jobs and budgets.
    approver: viewer; answers questions and resolves doubts.
    admin: everything; reveals secret values, and forgets sessions.
    """

    PRODUCER = "producer"
    VIEWER = "viewer"
    OPERATOR = "operator"
    APPROVER = "approver"
    ADMIN = "admin"


_INCLUDED: Final[Mapping[Role, frozenset[Role]]] = {
    Role.PRODUCER: frozenset({Role.PRODUCER}),
    Role.VIEWER: frozenset({Role.VIEWER}),
    Role.OPERATOR: frozenset({Role.OPERATOR, Role.VIEWER, Role.PRODUCER}),
    Role.APPROVER: frozenset({Role.APPROVER, Role.VIEWER}),
    Role.ADMIN: frozenset(Role),
}


@dataclass(frozen=True, slots=True)
class User:
    """A signed-in user.

    Attributes:
        name: Name in audit lines, and the sender of answers and changes.
        roles: Roles of the user, without those that they include.
        tenant: Tenant whose tasks and sessions the user sees and makes; None for those of all tenants.
    """

    name: str
    roles: frozenset[Role]
    tenant: str | None

    def __init__(self, name: str, roles: Collection[Role | str], tenant: str | None = None) -> None:
        object.__setattr__(self, "name", _check_user_name(name))
        object.__setattr__(self, "roles", frozenset(Role(role) for role in roles))
        object.__setattr__(self, "tenant", None if tenant is None else _checked_tenant(tenant))

    def may(self, *roles: Role) -> bool:
        """Return whether the user has one of the roles, itself or by one that includes it."""
        held = frozenset[Role]().union(*(_INCLUDED[role] for role in self.roles))
        return not held.isdisjoint(roles)

    @property
    def sees_all(self) -> bool:
        """Whether the user reads all tasks; a producer reads those that it has enqueued."""
        return self.may(Role.VIEWER)


def _checked_tenant(tenant: object) -> str:
    try:
        return check_tenant(tenant)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def _check_user_name(name: str) -> str:
    """Return a name that fits into a line of the log, such as an address of mail."""
    if not 1 <= len(name) <= _MAX_NAME or not name.isprintable() or name != name.strip():
        raise ConfigurationError(f"name of a user must be 1 to {_MAX_NAME} printable characters, got {name[:200]!r}")
    return name


_MAX_NAME: Final = 128

_PREFIX: Final = "perdure_"
_MAX_FILE: Final = 1 << 20
"""Bytes of a token file at most."""


def token_hash(token: str) -> str:
    """Return the hash of a token as token files have it. One round is enough for 256 random bits."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(slots=True)
class TokenFile:
    """Users by their tokens, from a TOML file.

    Raises `ConfigurationError` if the file cannot be read at first. Later the last readable version stays in force.
    """

    path: Path
    _users: Mapping[str, User] = field(default_factory=dict, repr=False)
    _version: tuple[int, int, int] | None = field(default=None, repr=False)
    _problem: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        self._version = self._stat()
        self._users = _read(self.path)

    def find(self, token: str) -> User | None:
        """Return the user of a token, or None."""
        return self.find_hash(token_hash(token))

    def find_hash(self, digest: str) -> User | None:
        """Return the user of the token that has a hash, or None."""
        self._refresh()
        return self._users.get(digest)

    def _refresh(self) -> None:
        try:
            version = self._stat()
            if version == self._version:
                return
            users = _read(self.path)
        except ConfigurationError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                logger.error("{}; the tokens that were read before stay valid", error)
            return
        self._users, self._version, self._problem = users, version, ""

    def _stat(self) -> tuple[int, int, int]:
        try:
            found = self.path.stat()
        except OSError as error:
            raise ConfigurationError(
                f"could not read the token file {self.path}: {error.strerror}; "
                f"make one: perdure web token NAME --role viewer --tokens {self.path}"
            ) from None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> dict[str, User]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE + 1)
        if len(data) > _MAX_FILE:
            raise ConfigurationError(f"token file {path} must have at most {_MAX_FILE} bytes")
        tables = tomllib.loads(data.decode()).get("token", [])
    except OSError as error:
        raise ConfigurationError(f"could not read the token file {path}: {error.strerror}") from None
    except ValueError as error:  # no TOML, or no UTF-8
        raise ConfigurationError(f"token file {path} must be TOML: {error}") from None
    if not isinstance(tables, list):
        raise ConfigurationError(f"token file {path} must have tables [[token]]")
    users: dict[str, User] = {}
    for number, table in enumerate(tables, 1):
        digest, user = _entry(path, number, table)
        if digest in users or any(other.name == user.name for other in users.values()):
            raise ConfigurationError(f"token {number} of {path} must have a name and a hash of its own: {user.name!r}")
        users[digest] = user
    return users


def _entry(path: Path, number: int, table: Any) -> tuple[str, User]:
    where = f"token {number} of {path}"
    if not isinstance(table, dict) or set(table) - {"tenant"} != {"name", "roles", "sha256"}:
        raise ConfigurationError(f"{where} must have name, roles, sha256, perhaps tenant, and nothing else")
    digest = str(table["sha256"]).lower()
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise ConfigurationError(f"sha256 of {where} must have 64 hexadecimal digits")
    roles = table["roles"]
    if not isinstance(roles, list) or not roles or not set(map(str, roles)) <= set(Role):
        raise ConfigurationError(f"roles of {where} must be a list of {', '.join(Role)}, got {roles!r}")
    try:
        return digest, User(str(table["name"]), roles, table.get("tenant"))
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from None


def add_token(path: Path, name: str, roles: Collection[Role], tenant: str | None = None) -> str:
    """Make a token, add its hash to a token file, and return the token. The file is created with mode 0600.

    Raises:
        ConfigurationError: The name is taken, name or tenant is not valid, or the file cannot be read or written.
    """
    user = User(name, roles, tenant)
    known = _read(path) if path.exists() else {}
    if any(other.name == name for other in known.values()):
        raise ConfigurationError(f"name {name!r} must be free, but {path} has a token of it: remove that table first")
    token = _PREFIX + secrets.token_urlsafe(32)
    listed = ", ".join(f'"{role}"' for role in sorted(user.roles))
    table = f'[[token]]\nname = {to_json(name).decode()}\nroles = [{listed}]\nsha256 = "{token_hash(token)}"\n'
    if user.tenant is not None:
        table += f'tenant = "{user.tenant}"\n'
    try:
        before = path.read_text() if path.exists() else ""
        with replaced_file(path) as file:
            file.write((before + ("\n" if before else "") + table).encode())
    except OSError as error:
        raise ConfigurationError(f"could not write the token file {path}: {error.strerror}") from None
    return token


def load_secret(path: Path) -> bytes:
    """Read the secret that signs cookies and answer links; make the file, with mode 0600, if it is missing.

    Raises:
        ConfigurationError: It cannot be read or written, or has fewer than 32 bytes.
    """
    try:
        with suppress(FileExistsError), os.fdopen(open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(secrets.token_urlsafe(48).encode())
        secret = read_regular(path, 4096).strip()  # a link may lead to it, as secrets are mounted into containers
    except OSError as error:
        raise ConfigurationError(f"could not use the secret file {path}: {error.strerror or error}") from None
    if len(secret) < 32:
        raise ConfigurationError(f"secret file {path} must have at least 32 random bytes: remove it to get a new one")
    return secret
