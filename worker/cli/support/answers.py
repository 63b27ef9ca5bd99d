"""Answers in the checkpoint of a task, before its arguments are replaced."""

from __future__ import annotations

from collections.abc import AsyncIterator

import orjson

from ....deadletter.letters import DeadLetter
from ....queues.errors import DecryptionError
from ....queues.explanation.texts import short
from ....queues.producer import Producer
from ....queues.transport.large_results import scan_fields
from ...journal.step_record import QUESTIONS, StepRecord
from .output import note


async def warn_of_answers(producer: Producer, letters: AsyncIterator[DeadLetter]) -> AsyncIterator[DeadLetter]:
    """Yield dead letters. Print which answers each has recorded, and to which questions, before it is yielded."""
    async for letter in letters:
        try:
            found = [answer async for answer in _answers(producer, letter)]
        except (DecryptionError, ValueError) as error:
            note(f"warning: could not read the recorded answers of task {letter.id}: {error}")
        else:
            for answer in found:
                note(f"warning: task {letter.id} has recorded {answer}")
            if found:
                note(
                    "a recorded answer holds if the question stays the same; with another text or person it is a "
                    "StepMismatch, unless the handler asks again (on_mismatch='rerun')"
                )
        yield letter


async def _answers(producer: Producer, letter: DeadLetter) -> AsyncIterator[str]:
    """Yield what was answered to which question. Raises `DecryptionError`, ValueError."""
    cipher = producer.gateway.encryptor.of(letter.partition, letter.id)
    async for name, value in scan_fields(producer.gateway, letter.partition.steps(letter.id), f"d:*{QUESTIONS}*"):
        if not name.removeprefix("d:").rpartition("/")[2].startswith(QUESTIONS):
            continue
        record = StepRecord.decode(cipher.decrypt(name, value))
        messages = [short(orjson.dumps(message["content"]).decode()) for message in orjson.loads(record.result)]
        yield f"{', '.join(messages) or 'no answer'} to {record.arguments}"
