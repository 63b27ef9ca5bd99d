"""Large arguments: stored in chunks before their task, whose record they become part of when it is stored.

The chunks are written to a key with a TTL, the upload. The script that stores the task renames the upload to the task's
record, so the chunks belong to the task from then on, and expire with it. The message has a reference in their place.
The object of arguments in the value store is saved before their upload, which has the link to it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from ..errors import LargeValueLost
from ..keys import Partition
from ..security.encryption import TaskCipher, argument_chunks, arguments_field
from ..security.secret_arguments import SecretPaths
from .gateway import Gateway
from .large_values import CutValue, LargeValue, cut, read_large
from .uploads import UPLOAD_ATTEMPTS, FieldUpload
from .value_store import ValueStore

LARGE_ARGUMENTS: Final = 2
"""Data format that a worker must know to read large arguments."""

_PLACE: Final = "args"


class LargeArguments(NamedTuple):
    """Arguments of a task that is not stored yet."""

    task_id: str
    value: CutValue

    @property
    def reference(self) -> LargeValue:
        """The reference to the arguments."""
        return self.value.reference

    @property
    def stored(self) -> bytes:
        """The arguments as they are stored."""
        return b"".join(self.value.chunks) if self.value.object is None else self.value.object

    async def upload(self, gateway: Gateway, key: str) -> None:
        """Store the object, if there is one, and the chunks one by one."""
        await self.value.save_object(gateway, f"the arguments of task {self.task_id}")
        upload = FieldUpload(gateway, key)
        for number, chunk in enumerate(self.value.chunks):
            await upload.put(self.reference.field(_PLACE, number), chunk)
        await upload.flush()


def cut_arguments(
    cipher: TaskCipher, task_id: str, task: str, secrets: SecretPaths, arguments: bytes, store: ValueStore | None
) -> LargeArguments:
    """Cut arguments, as JSON, encrypted if keys are set. store: see `cut`."""
    stored = cipher.encrypt(argument_chunks(task, secrets), arguments)
    return LargeArguments(task_id, cut(_PLACE, stored, size=len(arguments), store=store))


async def store_with_upload(
    gateway: Gateway,
    partition: Partition,
    large: LargeArguments | None,
    store: Callable[[Sequence[str]], Awaitable[Any]],
) -> Any:
    """Store one task, after the upload of its large arguments if it has any; return the answer of its script.

    Args:
        store: Runs the script with the upload among its keys. The answer is None if the upload is not complete.

    Raises:
        LargeValueLost: The upload expired, again and again, before the task was stored.
    """
    if large is None:
        return await store(())
    upload = partition.upload(large.task_id, large.reference.digest)
    for attempt in range(UPLOAD_ATTEMPTS):
        # Most scripts leave a task alone that is stored already; one that replaces it asks for the upload.
        if attempt or not await gateway.command("EXISTS", partition.record(large.task_id)):
            await large.upload(gateway, upload)
        answer = await store([upload])
        if answer is not None:
            return answer
    raise LargeValueLost(f"the arguments of task {large.task_id}", "their chunks expired before the task was stored")


async def read_arguments(
    gateway: Gateway,
    partition: Partition,
    task_id: str,
    task: str,
    secrets: SecretPaths,
    stored: bytes,
    *,
    plain: bool | None = None,
) -> bytes:
    """Return stored arguments as decrypted JSON, large ones from their chunks.

    Args:
        task: Name of the task.
        secrets: Paths of its secrets, as its envelope has them.
        plain: Whether arguments that are not encrypted are accepted; see `TaskCipher.decrypt`.

    Raises:
        DecryptionError: They cannot be decrypted.
        LargeValueLost: A chunk is missing or damaged.
    """
    cipher = gateway.encryptor.of(partition, task_id)
    reference = LargeValue.decode(stored)
    if reference is None:
        return cipher.decrypt(arguments_field(task, secrets), stored, plain=plain)
    decrypt = partial(cipher.decrypt, argument_chunks(task, secrets), plain=plain)
    what = f"the arguments of task {task_id}"
    return await read_large(gateway, partition.record(task_id), _PLACE, _PLACE, reference, decrypt, what)
