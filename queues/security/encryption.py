"""Data at rest: what a task carries and leaves, sealed with a key that Redis never sees.

Sealed are arguments, results, the checkpoint (step records, intents, saved progress), events that a run wrote, messages
in inboxes, and errors (in the record, the event log and the dead letter). What routing, listing and counting need stays
readable: ids, names of tasks, queues and steps, headers, options, counters, times, reasons, types of events. Scripts
move sealed data without opening it.

The form of sealed data, in bytes:

    1   0xC1: no JSON begins with it, and no UTF-8 text has it, so sealed and plain data are told apart
    1   version of this form: 1
    4   key id: the beginning of a hash of the key
    12  nonce, random
    n   ciphertext
    16  tag

Each task has a key of its own, derived from the deployment's (NIST SP 800-108r1, counter mode, HMAC-SHA-256) with the
namespace, the queue and the task's id as its context. What is sealed is bound to these and to its kind (arguments of
which task name, result, which step's record) as associated data, so that none can stand in another's place: a record
moved to another task, step or field cannot be opened.

Limits. The cipher is AES-256-GCM (NIST SP 800-38D). With random nonces of 96 bits, a key may seal 2^32 messages (8.3),
which keeps the chance that any nonce came twice below 2^-32. Since the key is a task's own, the limit is of the records
of one task, and a deployment's key need not be changed because of the number of its tasks. One message may have
2^36 - 32 bytes (5.2.1.1); the payload limit is far below.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, Final

from ..errors import InvalidKey, KeyMissing, NotEncrypted, TamperedData
from ..keys import Partition

__all__ = [
    "ERROR",
    "MARK",
    "MESSAGE",
    "NO_CIPHER",
    "NO_KEYS",
    "RESULT",
    "Encryptor",
    "TaskCipher",
    "arguments_field",
    "event_field",
    "is_encrypted",
]

MARK: Final = b"\xc1"
VERSION: Final = b"\x01"

RESULT: Final = "result"
ERROR: Final = "error"
MESSAGE: Final = "message"

_OVERHEAD: Final = 34

_NEWEST: Final = 15
"""Versions of the form that may come: what has none of them was never sealed, or was changed."""


def arguments_field(task: str) -> str:
    """The kind of the arguments of a task of this name: an envelope that is changed to another name opens nothing."""
    return f"args:{task}"


def event_field(number: int) -> str:
    """The kind of the data of an event: in another place of the log it cannot be opened."""
    return f"event:{number}"


def is_encrypted(data: bytes) -> bool:
    """Whether the data is sealed, by this version or a later one."""
    return data[:1] == MARK and len(data) >= _OVERHEAD


class Encryptor:
    """Seals with the first of its keys, opens with any. Without keys it leaves data as it is."""

    __slots__ = ("_ring", "active", "required")

    def __init__(self, keys: Sequence[bytes] = (), *, required: bool = False) -> None:
        """keys: 32 bytes each. required: data that is not sealed is refused. Raises `InvalidKey`."""
        if required and not keys:
            raise InvalidKey(
                "encryption is required and there is no key: set PERDURE_ENCRYPTION_KEYS or PERDURE_ENCRYPTION_KEY_FILE"
            )
        self.active = bool(keys)
        self.required = required
        self._ring: Any = _ring(tuple(keys)) if keys else None

    @property
    def key_ids(self) -> tuple[str, ...]:
        """The ids of the keys, as errors name them; the first one seals."""
        return self._ring.ids if self._ring is not None else ()

    def of(self, partition: Partition, task_id: str) -> TaskCipher:
        """The seal of one task."""
        return TaskCipher(self, partition, task_id)

    def __repr__(self) -> str:
        return f"Encryptor(keys={list(self.key_ids)}, required={self.required})"


class TaskCipher:
    """What seals and opens the data of one task."""

    __slots__ = ("_ciphers", "_partition", "_place", "_ring", "_sealer", "_task_id")

    def __init__(self, sealer: Encryptor, partition: Partition, task_id: str) -> None:
        self._sealer = sealer
        self._ring = sealer._ring
        self._partition = partition
        self._task_id = task_id
        self._place = b""
        self._ciphers: dict[bytes, Any] | None = None

    def encrypt(self, kind: str, data: bytes) -> bytes:
        """The data sealed; as it is where there is no key."""
        if self._ring is None:
            return data
        key_id: bytes = self._ring.first
        head = MARK + VERSION + key_id
        cipher = self._cipher(key_id)
        return bytes(head + cipher.encrypt(data, self._bound(head, kind)))

    def decrypt(self, kind: str, data: bytes, *, plain: bool | None = None) -> bytes:
        """The data as it was before it was sealed. plain: whether data that is not sealed will do; else as the sealer
        says. Raises `KeyMissing`, `TamperedData`, `NotEncrypted`.
        """
        if not is_encrypted(data):
            if self._sealer.required if plain is None else not plain:
                raise NotEncrypted(self._what(kind))
            return data
        if not 0 < data[1] <= _NEWEST:
            raise TamperedData(self._what(kind))
        if data[1:2] != VERSION:
            raise KeyMissing(self._what(kind), f"in a form of version {data[1]}, which this version cannot open")
        key_id = data[2:6]
        if self._ring is None or key_id not in self._ring.keys:
            known = ", ".join(self._sealer.key_ids) or "none"
            raise KeyMissing(self._what(kind), f"with key {key_id.hex()}, and the keys of this process are: {known}")
        cipher = self._cipher(key_id)
        opened: bytes | None = cipher.decrypt(data[6:], self._bound(data[:6], kind))
        if opened is None:
            raise TamperedData(self._what(kind))
        return opened

    def _cipher(self, key_id: bytes) -> Any:
        if self._ciphers is None:
            self._ciphers = {}
            self._place = f"{self._partition.namespace}\0{self._partition.queue}\0{self._task_id}".encode()
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            cipher = self._ciphers[key_id] = self._ring.cipher(key_id, self._place)
        return cipher

    def _bound(self, head: bytes, kind: str) -> bytes:
        return b"%b%b\0%b" % (head, self._place, kind.encode("utf-8", "surrogatepass"))

    def _what(self, kind: str) -> str:
        name, _, rest = kind.partition(":")
        words = {"args": "the arguments", "d": "a step", "i": "the intent of a step", "s": "what a step saved"}
        step = f" {rest!r}" if name in ("d", "i", "s") else ""
        return f"{words.get(name, f'the {name}')}{step} of task {self._task_id}"


@lru_cache(maxsize=8)
def _ring(keys: tuple[bytes, ...]) -> Any:
    """The cipher is imported here, where there is a key: without one, nothing of it is needed."""
    try:
        module = import_module(".aesgcm", __package__)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "cryptography":
            raise
        raise InvalidKey(
            "encryption needs a package that is not installed: pip install 'perdure[encryption]'"
        ) from None
    return module.KeyRing(keys)


NO_KEYS: Final = Encryptor()
"""Leaves data as it is, and says so clearly where it meets sealed data."""

NO_CIPHER: Final = NO_KEYS.of(Partition("", "", 0), "")
"""Of no task."""
