"""Data that earlier versions have stored is read, resumed and replayed by this one."""

from __future__ import annotations

import re
from typing import Any, get_args

import orjson
import pytest
from perdure import App, Settings, State
from perdure.deadletter.letters import Filter, list_letters
from perdure.deadletter.replay import Replay, replay
from perdure.queues import Namespace, TaskHandle, list_tasks
from perdure.queues.keys import DATA_FORMAT, TaskKey
from perdure.worker.agents.journal.history import check_state

from tests.support.emitted import values_of
from tests.support.stored_formats import FORMATS, NAMESPACE, SECRET, build, dump, restore, scenario
from tests.support.workers import bounded, history, running_worker

pytestmark = pytest.mark.integration


@pytest.fixture
def namespace_name() -> str:
    return NAMESPACE


WITHOUT_JOINS = "1"
"""Format that has no joins of children."""

FILES = {file.stem: orjson.loads(file.read_bytes()) for file in sorted(FORMATS.glob("*.json"))}


async def found(app: App, task_id: str) -> TaskHandle[Any]:
    handle = await app.producer.find(task_id)
    assert handle is not None
    return handle


def test_each_format_has_a_file() -> None:
    assert FILES.keys() == {str(number) for number in range(1, DATA_FORMAT + 1)}


@pytest.mark.parametrize("number", FILES)
async def test_data_of_each_format_is_read_resumed_and_replayed(number: str, settings: Settings) -> None:
    ran: list[str] = []
    async with build(settings, ran, mended=True) as app:
        gateway, namespace = app.producer.gateway, app.producer.namespace
        await restore(gateway, namespace, FILES[number])
        known = {record.id: record async for record in list_tasks(gateway, namespace)}
        family = {"gathers": State.WAITING, "child": State.SUCCEEDED, "child-1": State.SCHEDULED}
        assert {name: record.state for name, record in known.items()} == {
            **(family if number != WITHOUT_JOINS else {}),
            "succeeds": State.SUCCEEDED,
            "retries": State.SCHEDULED,
            "dies": State.DEAD,
            "listens": State.WAITING,
            "reads": State.SCHEDULED,
            "keeps": State.SCHEDULED,
            "stops": State.QUEUED,
            "pending": State.RUNNING,
            "delayed": State.SCHEDULED,
            "queued": State.QUEUED,
        }
        assert (known["listens"].waits, known["listens"].unused) == ("message", 1)
        assert (known["retries"].attempts, known["dies"].attempts) == (1, 1)
        handles = {name: await found(app, name) for name in known}
        assert await bounded(handles["succeeds"].result()) == "only done"
        assert [event.type for event in await history(handles["dies"])] == ["step_completed", "buried"]
        (letter,) = [one async for one in list_letters(gateway, [namespace.partition("default")], Filter())]
        assert (letter.id, letter.message) == ("dies", "given up")
        assert [one.content for one in await handles["listens"].pending_messages()] == ["not hers"]

        await handles["listens"].send("hers", sender="ada")
        assert await replay(gateway, letter, Replay())
        for name in ("retries", "delayed", "reads", "keeps", "child-1"):
            await gateway.command("ZADD", namespace.partition("default").due, "XX", 1, name)
        async with running_worker(app):
            assert await bounded(handles["retries"].result()) == ["first done", "second done"]
            assert await values_of(app, handles["retries"]) == ["begin", "keyed"], "each once, over all runs"
            assert await bounded(handles["dies"].result()) == "before done"
            assert await bounded(handles["listens"].result()) == ["open done", "early", "hers"]
            assert await bounded(handles["delayed"].result()) == "only done"
            assert await bounded(handles["queued"].result()) == "only done"
            assert await bounded(handles["stops"].result()) == "before stopping done"
            assert await bounded(handles["pending"].result()) == ["first done", "second done"]
            assert await bounded(handles["keeps"].result()) == [SECRET, f"{SECRET} done"]
            assert await bounded(handles["reads"].result()) == {
                "results": {"one": "agent one done", "two": "agent two done"},
                "decisions": ["read one", "read two"],
            }
            if "gathers" in handles:
                assert await bounded(handles["gathers"].result()) == [
                    "child one done",
                    "child two done",
                    "child three done",
                ]
                assert ran.count("child three") == 1
                ran.remove("child three")
        assert (await handles["pending"].record()).crashes == 1
        assert await check_state(gateway, namespace.partition("default"), "reads") is not None
        assert ran == ["only", "only"], "only the tasks that never ran have run a step"


async def test_the_file_of_this_format_has_the_keys_and_fields_of_today(settings: Settings) -> None:
    """A change of what is stored fails here: it must stay readable by the version before, or be a new format.

    Then write the file again: tests/support/stored_formats.py.
    """
    stored = FILES[str(DATA_FORMAT)]
    await scenario(settings)
    async with build(settings, [], mended=True) as app:
        today = await dump(app.producer.gateway, Namespace(settings.namespace))
    assert shape(today) == shape(stored)
    kinds = {name.partition("}:")[2].partition(":")[0] for name in stored}
    assert kinds >= {*get_args(TaskKey)} - {"control"}


def shape(data: dict[str, Any]) -> dict[str, tuple[str, bool, list[str]]]:
    """Return type, expiry and fields of each key, without the parts of names that differ from run to run."""
    return {
        name: (one["type"], one["expires"], sorted({_stem(field) for field in one["content"]}))
        for name, one in data.items()
    }


def _stem(field: str) -> str:
    return re.sub(r"^(m|n|id):.*", r"\1:", field)
