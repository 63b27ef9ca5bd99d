"""Recorded answers of dead letters: what persons answered to which questions before the task was given up."""

from __future__ import annotations

import orjson

from ..deadletter.letters import DeadLetter
from ..queues.producer import Producer
from ..queues.transport.large_results import scan_fields
from ..queues.waits import RECORDS
from ..queues.wording import short
from .durable.journal.step_record import StepRecord


async def recorded_answers(producer: Producer, letter: DeadLetter) -> list[str]:
    """Return the recorded answers of a dead letter, each with its question.

    Raises:
        DecryptionError: The key is missing.
        ValueError: A record is damaged.
    """
    found: list[str] = []
    cipher = producer.gateway.encryptor.of(letter.partition, letter.id)
    async for name, value in scan_fields(producer.gateway, letter.partition.steps(letter.id), f"d:*{RECORDS}*"):
        if not name.removeprefix("d:").rpartition("/")[2].startswith(RECORDS):
            continue
        record = StepRecord.decode(cipher.decrypt(name, value))
        outcome = orjson.loads(record.result)
        answer = short(orjson.dumps(outcome["answer"]).decode()) if "answer" in outcome else "no answer"
        found.append(f"{answer} to {record.arguments}")
    return found
