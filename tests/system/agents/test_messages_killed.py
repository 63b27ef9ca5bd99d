"""Messages to an agent whose process is dead reach its model, once and in order."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from perdure import Producer
from perdure.worker.settings import Settings

from tests.support.paths import PROGRAMS
from tests.support.processes import worker_processes
from tests.support.workers import bounded, history

pytestmark = [pytest.mark.integration, pytest.mark.processes]

WORDS = ("the first word", "the second word", "the third word")


async def test_messages_sent_to_a_dead_agent_are_in_the_next_prompt_once_and_in_order(
    settings: Settings, tmp_path: Path
) -> None:
    short = settings.model_copy(update={"lease": 0.5})
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        handle = await producer.enqueue("listening", {"goal": "listen"}, task_id="l", queue="listening")
        with worker_processes(short, tmp_path, PROGRAMS / "agents" / "listening.py") as workers:
            first = workers.start()
            await workers.line("asked")
            first.kill()
            for word in WORDS:
                await handle.send(word, sender="ada")
            workers.start()
            result = await bounded(handle.result())
        prompts = {
            key: await anyio.Path(tmp_path, f"journal.{key}").read_text() for key in ("before", "asked", "after")
        }
        assert await handle.pending_messages() == []
        taken = [event.type for event in await history(handle) if event.type in ("received", "message_added")]
    assert not any(word in prompts["before"] for word in WORDS)
    for text in (prompts["asked"], prompts["after"], result):
        assert [text.count(word) for word in WORDS] == [1, 1, 1]
        places = [text.index(word) for word in WORDS]
        assert places == sorted(places)
        assert text.count("Message from `ada`, sent 20") == 3
    assert taken == ["received", "message_added"] * 3
