"""Corrections of a session's state that wait for a turn.

A turn that runs has a task, whose inbox takes corrections. While none runs, the record of the session keeps them, the
next run of a turn puts them into that inbox when it begins, and the end of the turn removes them with the state that it
stores. A turn that fails or is cancelled stores no state, so they wait for its replay or the turn after it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

import orjson

from ..envelope import DEFAULT_PAYLOAD_LIMIT, check_size
from ..errors import NoKey
from ..security.encryption import is_encrypted
from ..transport.gateway import Gateway
from ..transport.pipelining import Argument
from ..transport.scripts import queue_script
from .record import CORRECTIONS, SessionCorrection, SessionRecord

_CORRECT = queue_script("session_correct")


async def store_correction(
    gateway: Gateway, record: SessionRecord, correction: SessionCorrection, *, limit: int = DEFAULT_PAYLOAD_LIMIT
) -> Literal["stored", "turn", "changed", "missing"]:
    """Store a correction in a session that is as it was read, and say what is in the way otherwise.

    limit: Largest size of all corrections that wait, in bytes. Raises `PayloadTooLarge`, `DecryptionError`, `NoKey`.
    """
    cipher = record.address.cipher(gateway)
    if not gateway.encryptor.active and is_encrypted(record.state or b""):
        raise NoKey(f"a correction to session {record.name}", "the session")
    waiting = record.waiting_corrections()
    if any(one.id == correction.id for one in waiting):
        return "stored"
    data = orjson.dumps([asdict(one) for one in (*waiting, correction)])
    check_size("the corrections that wait for the next turn", len(data), limit)
    keys = [record.address.session, record.address.partition.timeline]
    stored = cipher.encrypt(CORRECTIONS, data)
    args: list[Argument] = [record.address.digest, str(record.born), record.corrections or b"", stored, record.ended]
    (answer,) = await gateway.run(_CORRECT, keys, args)
    found: Literal["stored", "turn", "changed", "missing"] = answer.decode()
    return found
