"""Approvers: people and programs whose signature proves who has answered a question.

An approver has a pair of Ed25519 keys (RFC 8032). Workers have the public keys, which say nothing that they could sign
with, so neither a worker nor a task that it runs can answer in the name of an approver. A worker that knows approvers
takes only answers that one of them has signed: one of those whom `who=` of the wait names, if it names an approver or a
group of them, else any of them. A worker without them takes an answer of any process that has the deployment's key, and
the name of its sender is what that process says.

What is signed is the line `perdure answer 1`, then a JSON array, as orjson writes it with sorted keys: namespace, queue
and id of the task, id of the wait, digest of the question, the answer, and the name of the approver. The digest of the
question (`question_digest` in waits.py) covers its opening, so that one signature answers one opening of one question,
and what people were shown. JSON says where each text ends, so no two statements have the same bytes.

Text forms, one key per line, `#` for comments:

    ada ed25519:BASE64          a public key, for workers; an approver may have several
    finance = ada grace         a group
    ada ed25519-private:BASE64  a private key, for the process that answers

Keys are 32 bytes in base64. A name has no white space.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import orjson

from ..errors import ConfigurationError
from ..wording import listed
from .keyring import read_lines

_BYTES: Final = 32
_PUBLIC: Final = "ed25519:"
_PRIVATE: Final = "ed25519-private:"
_NAME: Final = re.compile(r"[^\s=;#:][^\s=;]{0,127}")
_LINES: Final = re.compile(r"[\n;]")
_SHOWN: Final = 10

_REMEDY: Final = "make one with 'perdure keys generate --approver NAME'"


class Statement(NamedTuple):
    """An answer as it is signed. question: digest of the question as it was opened. value: JSON data."""

    namespace: str
    queue: str
    task_id: str
    wait: str
    question: str
    value: Any
    approver: str

    def encode(self) -> bytes:
        """Return the bytes that are signed."""
        return b"perdure answer 1\n" + orjson.dumps([*self], option=orjson.OPT_SORT_KEYS)


@dataclass(frozen=True, slots=True)
class ApproverKey:
    """The private key of an approver.

    Attributes:
        name: Of the approver.
        seed: The key, 32 bytes.
    """

    name: str
    seed: bytes = field(repr=False)

    @classmethod
    def generate(cls, name: str) -> Self:
        """Return a new key. Raises `ConfigurationError` for a name that cannot be used."""
        return cls(check_approver(name), os.urandom(_BYTES))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the key of a file with one. Raises `ConfigurationError`."""
        keys = read_approver_keys(path)
        if len(keys) != 1:
            raise ConfigurationError(f"approver key file {path} must hold one key, got {len(keys)}: {_names(keys)}")
        (found,) = keys.values()
        return cls(found.name, found.seed)

    @property
    def private_line(self) -> str:
        """The line of a private key file."""
        return f"{self.name} {_PRIVATE}{base64.b64encode(self.seed).decode()}"

    @property
    def public_line(self) -> str:
        """The line by which workers know the approver. Raises `ConfigurationError` without `cryptography`."""
        return f"{self.name} {_PUBLIC}{base64.b64encode(_ed25519().public_key(self.seed)).decode()}"

    def sign(self, statement: Statement) -> str:
        """Return the signature of a statement in base64. Raises `ConfigurationError` without `cryptography`."""
        return base64.b64encode(_ed25519().sign(self.seed, statement.encode())).decode()


@dataclass(frozen=True, slots=True)
class Approvers:
    """The approvers that a process knows.

    Attributes:
        keys: Public keys by name.
        groups: Names of the members by the name of a group.
    """

    keys: Mapping[str, Sequence[bytes]]
    groups: Mapping[str, frozenset[str]]

    def who_may_answer(self, who: str) -> frozenset[str]:
        """Return the names of those who may answer a question. who: whom it asks."""
        return self.groups.get(who) or frozenset([who] if who in self.keys else self.keys)

    def problem(self, statement: Statement, signature: str, who: str) -> str | None:
        """Return why a statement is not signed by one who may answer; None if it is. who: whom the question asks."""
        name, allowed = statement.approver, self.who_may_answer(who)
        if not signature:
            return f"no approver has signed it: {_names(allowed)} can answer"
        if name not in allowed:
            known = "may not answer this question" if name in self.keys else "is not known here"
            return f"approver {name!r} {known}: {_names(allowed)} can answer"
        try:
            given = base64.b64decode(signature, validate=True)
        except (binascii.Error, ValueError):
            given = b""
        data, is_signed = statement.encode(), _ed25519().is_signed
        if not any(is_signed(key, data, given) for key in self.keys[name]):
            return f"its signature is not one of approver {name!r} for this answer to this question"
        return None


class AnswerKeys(NamedTuple):
    """Keys for answers of a process: the approvers that it knows, and a private key of its own."""

    approvers: Approvers | None = None
    own: ApproverKey | None = None


def make_answer_keys(text: str, file: Path | None, own: Path | None) -> AnswerKeys | None:
    """Return the keys that settings name; None without any. Raises `ConfigurationError`."""
    if text.strip() and file is not None:
        raise ConfigurationError(
            "PERDURE_APPROVERS and PERDURE_APPROVERS_FILE must not both be set: leave one of them out"
        )
    if file is not None:
        source = f"approvers file {file}"
        lines = read_lines(file, source, secret=False)
    else:
        source = "PERDURE_APPROVERS"
        lines = _LINES.split(text)
    known = read_approvers(lines, source) if text.strip() or file is not None else None
    key = None if own is None else ApproverKey.read(own.expanduser())
    if known is None and key is None:
        return None
    _ed25519()
    return AnswerKeys(known, key)


def read_approvers(lines: Iterable[str], source: str) -> Approvers:
    """Parse public keys and groups. Raises `ConfigurationError`."""
    keys: dict[str, list[bytes]] = {}
    groups: dict[str, frozenset[str]] = {}
    for number, words in _words(lines):
        where = f"{source}: line {number}"
        name = _name(where, words)
        if len(words) > 1 and words[1] == "=":
            if name in groups or len(words) < 3:
                raise ConfigurationError(f"{where}: group {name!r} must be there once and have members: {name} = ada")
            groups[name] = frozenset(words[2:])
            continue
        if len(words) > 1 and words[1].startswith(_PRIVATE):
            raise ConfigurationError(
                f"{where}: it is the private key of {name!r}, which workers must not have: give its public line"
            )
        keys.setdefault(name, []).append(_key(where, words, _PUBLIC))
    if not keys:
        raise ConfigurationError(f"{source} has no approver: give lines such as 'ada {_PUBLIC}BASE64'; {_REMEDY}")
    for group, members in groups.items():
        if group in keys:
            raise ConfigurationError(f"{source}: {group!r} must be an approver or a group, and is both")
        if unknown := members - keys.keys():
            raise ConfigurationError(f"{source}: group {group!r} has members without a key: {_names(unknown)}")
    return Approvers(keys, groups)


def read_approver_keys(path: Path) -> dict[str, ApproverKey]:
    """Read private keys of a file by name, one per line. Raises `ConfigurationError`."""
    source = f"approver key file {path}"
    found: dict[str, ApproverKey] = {}
    for number, words in _words(read_lines(path, source, secret=True)):
        where = f"{source}: line {number}"
        name = _name(where, words)
        if name in found:
            raise ConfigurationError(f"{where}: {name!r} must have one key in this file, and has two")
        found[name] = ApproverKey(name, _key(where, words, _PRIVATE))
    if not found:
        raise ConfigurationError(f"{source} holds no key; {_REMEDY}")
    return found


def check_approver(name: str) -> str:
    """Return the name of an approver. Raises `ConfigurationError`."""
    if not _NAME.fullmatch(name) or not name.isprintable():
        raise ConfigurationError(
            f"name of an approver must be 1 to 128 printable characters without spaces, '=' and ';', got {name[:200]!r}"
        )
    return name


def _words(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the words of each line that is not empty and no comment."""
    for number, line in enumerate(lines, 1):
        if (words := line.split()) and not words[0].startswith("#"):
            yield number, words


def _name(where: str, words: Sequence[str]) -> str:
    try:
        return check_approver(words[0])
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from None


def _key(where: str, words: Sequence[str], prefix: str) -> bytes:
    """Return the key of a line. The error shows nothing of it."""
    try:
        key = base64.b64decode(words[1].removeprefix(prefix), validate=True) if words[1:] else b""
    except (binascii.Error, ValueError):
        key = b""
    if len(words) != 2 or not words[1].startswith(prefix) or len(key) != _BYTES:
        raise ConfigurationError(f"{where} must be a name and {prefix}BASE64 of {_BYTES} bytes; {_REMEDY}")
    return key


def _names(names: Iterable[str]) -> str:
    return listed(sorted(names), _SHOWN)


def _ed25519() -> Any:
    """Return the module that needs `cryptography`, an extra. Raises `ConfigurationError` without it."""
    try:
        from . import ed25519
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "cryptography":
            raise
        raise ConfigurationError(
            "keys of approvers need the package cryptography: pip install 'perdure[encryption]'"
        ) from None
    return ed25519
