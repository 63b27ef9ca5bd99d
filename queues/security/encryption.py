"""Encryption of the tasks' data at rest, with keys that Redis never sees.

Encrypted are arguments, results, the checkpoint (step records, intents, saved progress), events that a run wrote,
messages in inboxes, and errors (in the record, the event log and the dead letter). Data that routing, listing and
counting need stays readable: ids, names of tasks, queues and steps, headers, options, counters, times, reasons, types
of events. Scripts move encrypted data as it is.

With `sign_only`, the data is signed and stays readable: the same values are bound to the same places, and with the same
key. Either form is read, so a deployment can change from one to the other. Without a key, data is neither.

The format of encrypted data, in bytes:

    1   0xC1: no JSON begins with it, and no UTF-8 text contains it, so it distinguishes encrypted data from plain data
    1   version of this format: 1
    4   key id: the first bytes of a hash of the key
    12  nonce, random
    n   ciphertext
    16  tag

The format of signed data has the version 2, and after the key id the 32 bytes of the signature and the data.

Each task has its own key, derived from the deployment's (NIST SP 800-108r1, counter mode, HMAC-SHA-256) with the
namespace, the queue and the task's id as context. These and the kind of the data (arguments of which task name with
which marks of secrets, result, which step's record, event of which number and type) are the associated data, so a
record moved to another task, step or field cannot be decrypted, nor can arguments whose marks were removed.

The kind of an event has its number, since a task has many events of one type and their order is its state. The other
kinds have the name of their field and no number: a reader knows which field it reads, but the number of the entry that
wrote a field is a plain counter of Redis, which proves nothing. An older value of the same field can be put back.

The data of a session have the number of their turn, and its key the time of the first message: an older value of a
field does not count (queues/sessions/record.py).

Where encryption is required, data that is not encrypted is never decrypted into truth, by any reader. One that
only shows data says instead why it cannot be read, or marks it as not encrypted. Events without a number, which scripts
write, may be plain: they say when something happened, and no state is made from them.

Limits. The cipher is AES-256-GCM (NIST SP 800-38D). With random nonces of 96 bits, a key may encrypt 2^32 messages
(8.3), which keeps the probability of a repeated nonce below 2^-32. The limit applies to the records of one task, since
each task has its own key; the number of tasks does not wear out a deployment's key. One message may have 2^36 - 32
bytes (5.2.1.1); the payload limit is far below.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson

from ..errors import ConfigurationError, KeyMissing, NotEncrypted, TamperedData
from ..keys import Partition
from .keyring import KeyRing, read_key_file, read_keys
from .secret_arguments import SecretPaths

if TYPE_CHECKING:
    from .aesgcm import Cipher

MARK: Final = b"\xc1"
VERSION: Final = b"\x01"
SIGNED: Final = b"\x02"

RESULT: Final = "result"
RESULT_CHUNKS: Final = "result:chunks"
ERROR: Final = "error"
HEAD: Final = "head"
MESSAGE: Final = "message"
PROGRESS: Final = "progress"

_OVERHEAD: Final = 34

_ENCRYPTING: Final = b"perdure task key"
_SIGNING: Final = b"perdure task signature"
"""Labels of the keys that are derived."""

_SIGNATURE: Final = 32
"""Bytes of a signature."""

_NEWEST: Final = 15
"""Highest version that a later release may use; data with any other was never encrypted, or was changed."""


def arguments_field(task: str, secrets: SecretPaths) -> str:
    """Return the kind of a task's arguments.

    An envelope that is changed to another name, or to other marks of secrets, cannot decrypt them.
    """
    return _marked("args", task, secrets)


def argument_chunks(task: str, secrets: SecretPaths) -> str:
    """Return the kind of arguments that are stored in chunks."""
    return _marked("chunks", task, secrets)


def _marked(kind: str, name: str, secrets: SecretPaths) -> str:
    # the marks come first: JSON ends where it says, so no name can look like marks and a shorter name
    return f"marked-{kind}:{orjson.dumps(secrets).decode()}{name}" if secrets else f"{kind}:{name}"


def message_field(number: int) -> str:
    """Return the kind of an inbox message, which cannot be decrypted under another number."""
    return f"{MESSAGE}:{number}"


def event_field(number: int, event_type: str) -> str:
    """Return the kind of an event's data, which cannot be decrypted at another place of the log or as another type."""
    return f"event:{number}:{event_type}"


def step_chunks(step: str) -> str:
    """Return the kind of a step result that is stored in chunks."""
    return f"c:{step}"


def is_encrypted(data: bytes) -> bool:
    """Whether the data is encrypted or signed, by this version or a later one."""
    return data[:1] == MARK and len(data) >= _OVERHEAD


class Encryptor:
    """A deployment's keys: the first one encrypts, any decrypts. Without keys, data stays plain."""

    __slots__ = ("_ring", "_version", "active", "required")

    def __init__(self, keys: Sequence[bytes] = (), *, required: bool = False, sign_only: bool = False) -> None:
        """Raises `ConfigurationError`.

        Args:
            keys: 32 bytes each.
            required: refuse data that is neither encrypted nor signed.
            sign_only: sign the data, and leave it readable.
        """
        if required and not keys:
            raise ConfigurationError(
                "encryption is required and there is no key: set PERDURE_ENCRYPTION_KEYS or PERDURE_ENCRYPTION_KEY_FILE"
            )
        if sign_only and not keys:
            raise ConfigurationError(
                "PERDURE_SIGN_ONLY needs a key to sign with: set PERDURE_ENCRYPTION_KEYS or PERDURE_ENCRYPTION_KEY_FILE"
            )
        self._version = SIGNED if sign_only else VERSION
        self.active = bool(keys)
        self.required = required
        self._ring = KeyRing(keys) if keys else None
        if keys and not sign_only:
            _cipher_type()

    @property
    def key_ids(self) -> tuple[str, ...]:
        """The ids of the keys, as errors name them; the first one encrypts."""
        return self._ring.ids if self._ring is not None else ()

    def of(self, partition: Partition, task_id: str) -> TaskCipher:
        """Return the cipher of one task."""
        return TaskCipher(self, partition, task_id)

    @property
    def sign_only(self) -> bool:
        """Whether data is signed only."""
        return self._version == SIGNED

    def __repr__(self) -> str:
        return f"Encryptor(keys={list(self.key_ids)}, required={self.required})"


class Signer:
    """Signing and verification with one task's key: HMAC-SHA-256 (RFC 2104) over the data and what it is bound to."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key = key

    def encrypt(self, data: bytes, associated: bytes) -> bytes:
        """Return the signature and the data."""
        return self._digest(data, associated) + data

    def decrypt(self, data: bytes, associated: bytes) -> bytes | None:
        """Return the data; None if it or the associated data was changed."""
        given, signed = data[:_SIGNATURE], data[_SIGNATURE:]
        return signed if hmac.compare_digest(given, self._digest(signed, associated)) else None

    def _digest(self, data: bytes, associated: bytes) -> bytes:
        # the length says where the associated data ends
        return hmac.digest(self._key, b"%d " % len(associated) + associated + data, hashlib.sha256)


class TaskCipher:
    """Encryption and decryption of one task's data."""

    __slots__ = ("_ciphers", "_context", "_encryptor", "_partition", "_ring", "_task_id")

    def __init__(self, encryptor: Encryptor, partition: Partition, task_id: str) -> None:
        self._encryptor = encryptor
        self._ring = encryptor._ring
        self._partition = partition
        self._task_id = task_id
        self._context = b""
        self._ciphers: dict[bytes, Cipher | Signer] | None = None

    @property
    def task_id(self) -> str:
        """The id of the task."""
        return self._task_id

    @property
    def encrypts(self) -> bool:
        """Whether there is a key."""
        return self._ring is not None

    @property
    def accepts_plain(self) -> bool:
        """Whether `decrypt` returns data that is neither encrypted nor signed."""
        return not self._encryptor.required

    def encrypt(self, kind: str, data: bytes) -> bytes:
        """Return the data encrypted or signed, or unchanged if there is no key."""
        if self._ring is None:
            return data
        key_id = self._ring.first
        header = MARK + self._encryptor._version + key_id
        return header + self._cipher(self._ring, header).encrypt(data, self._associated(header, kind))

    def decrypt(self, kind: str, data: bytes) -> bytes:
        """Return the plain data. Raises `KeyMissing`, `TamperedData`, `NotEncrypted`."""
        if not is_encrypted(data):
            if self._encryptor.required:
                raise NotEncrypted(self._what(kind))
            return data
        if not 0 < data[1] <= _NEWEST:
            raise TamperedData(self._what(kind))
        if data[1:2] not in (VERSION, SIGNED):
            raise KeyMissing(self._what(kind), f"encrypted in format {data[1]}, which only a later version can read")
        key_id = data[2:6]
        if self._ring is None or key_id not in self._ring.keys:
            known = ", ".join(self._encryptor.key_ids) or "none"
            how = "signed" if data[1:2] == SIGNED else "encrypted"
            problem = f"{how} with key {key_id.hex()}, and the keys of this process are: {known}"
            raise KeyMissing(self._what(kind), problem)
        decrypted = self._cipher(self._ring, data[:6]).decrypt(data[6:], self._associated(data[:6], kind))
        if decrypted is None:
            raise TamperedData(self._what(kind))
        return decrypted

    def _cipher(self, ring: KeyRing, header: bytes) -> Cipher | Signer:
        """Return the cipher for data with this header."""
        if self._ciphers is None:
            self._ciphers = {}
            self._context = f"{self._partition.namespace}\0{self._partition.queue}\0{self._task_id}".encode()
        cipher = self._ciphers.get(header)
        if cipher is None:
            signed = header[1:2] == SIGNED
            key = ring.derive(header[2:], _SIGNING if signed else _ENCRYPTING, self._context)
            cipher = self._ciphers[header] = (Signer if signed else _cipher_type())(key)
        return cipher

    def _associated(self, header: bytes, kind: str) -> bytes:
        """Return the associated data: header, task and kind of what is encrypted."""
        return b"%b%b\0%b" % (header, self._context, kind.encode("utf-8", "surrogatepass"))

    def _what(self, kind: str) -> str:
        name, _, rest = kind.partition(":")
        steps = {"c": "a step", "d": "a step", "i": "the intent of a step", "s": "the progress of a step"}
        if name in steps:
            return f"{steps[name]} {rest!r} of task {self._task_id}"
        name = name.removeprefix("marked-")
        if self._partition.queue == "~sessions":
            return f"the {name} of turn {rest} of session {self._task_id.partition(' ')[0]}"
        return f"the {'arguments' if name in ('args', 'chunks') else name} of task {self._task_id}"


def _cipher_type() -> type[Cipher]:
    """Return the class of ciphers, whose package is an extra that a process without keys does not need."""
    try:
        from .aesgcm import Cipher
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "cryptography":
            raise
        raise ConfigurationError(
            "encryption needs the package cryptography: pip install 'perdure[encryption]'"
        ) from None
    return Cipher


NO_KEYS: Final = Encryptor()
"""Leaves plain data as it is; raises `KeyMissing` for encrypted data."""

NO_CIPHER: Final = NO_KEYS.of(Partition("", "", 0), "")
"""The cipher of no task and no key."""


def make_encryptor(text: str, path: Path | None, *, required: bool = False, sign_only: bool = False) -> Encryptor:
    """Return the encryptor for keys given as text or in a file. Raises `ConfigurationError`."""
    if text.strip() and path is not None:
        raise ConfigurationError(
            "PERDURE_ENCRYPTION_KEYS and PERDURE_ENCRYPTION_KEY_FILE must not both be set: leave one of them out"
        )
    keys = read_key_file(path) if path is not None else read_keys(text, "PERDURE_ENCRYPTION_KEYS")
    if keys or required or sign_only:
        return Encryptor(keys, required=required, sign_only=sign_only)
    return NO_KEYS
