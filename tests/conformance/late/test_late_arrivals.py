"""Bytes that arrive late change nothing, or no more than they may."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from perdure.queues import Gateway, Namespace, Producer, State
from perdure.queues.delivery.quarantine_store import quarantine, take_quarantined
from perdure.queues.derived_tasks import read_task_input
from perdure.queues.errors import Unavailable
from perdure.queues.event_log import read_events
from perdure.queues.limits.store import ReleaseRequest, TakeRequest
from perdure.queues.sessions.removal import forget_session
from perdure.queues.shared_config import set_config
from perdure.queues.transport.scripts import queue_script

from tests.conformance.late import Moments, Scene
from tests.conformance.late.admission import ADMISSION
from tests.conformance.late.chores import (
    CHORES,
    FINDING,
    LARGE,
    UPLOADING,
    run_to_its_end,
    upload,
)
from tests.conformance.late.commands import COMMANDS
from tests.conformance.late.joins import JOINS
from tests.conformance.late.key_values import KEY_VALUES
from tests.conformance.late.limits import LIMITS, USES, hold_bytes
from tests.conformance.late.registrations import REGISTERING, REGISTRATIONS
from tests.conformance.late.sessions import SESSIONS, address_of, answered
from tests.conformance.late.workspaces import WORKSPACES
from tests.conftest import ON_SERVERS
from tests.support.consumers import claim_all, pending, read, worker
from tests.support.lossy_proxy import LossyProxy
from tests.support.task_places import dump, places

pytestmark = pytest.mark.parametrize("gateway", ON_SERVERS, indirect=True)


@pytest.fixture
def scene(
    gateway: Gateway, namespace: Namespace, producer: Producer, line: tuple[Gateway, LossyProxy], tmp_path: Path
) -> Scene:
    late, proxy = line
    return Scene(gateway, late, proxy, namespace, producer, tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        *COMMANDS.cases,
        *ADMISSION.cases,
        *CHORES.cases,
        *JOINS.cases,
        *KEY_VALUES.cases,
        *LIMITS.cases,
        *REGISTRATIONS.cases,
        *SESSIONS.cases,
        *WORKSPACES.cases,
    ],
)
async def test_a_call_that_arrives_late_changes_nothing(scene: Scene, case: Callable[[Scene], Moments]) -> None:
    await scene.play(case)


# commands that hand out messages, which are never sent again


@pytest.mark.parametrize("act", ["read", "claim", "take_quarantined"])
async def test_a_message_that_is_handed_out_late_is_recovered_by_its_worker(scene: Scene, act: str) -> None:
    """The caller got an error in place of the reply, and has the message all the same."""
    await scene.enqueue()
    a = await worker(scene.late, scene.partition)
    if act != "read":
        (first,) = await read(await scene.worker("b"))
        await (scene.settle("release", first) if act == "claim" else quarantine(scene.gateway, first, "x"))
    scene.proxy.hold(b"XREADGROUP" if act == "read" else queue_script(act).sha.encode())
    calls: dict[str, Callable[[], Any]] = {
        "read": partial(read, a),
        "claim": partial(claim_all, a),
        "take_quarantined": partial(take_quarantined, scene.late, scene.partition, "a"),
    }
    with pytest.raises(Unavailable):
        await calls[act]()
    await scene.proxy.deliver()
    ((_, owner, _, _),) = await pending(scene.gateway, scene.partition)
    assert owner == "a"
    (recovered,) = await a.recover_own(scene.partition)
    await scene.settle("succeed", recovered)
    assert await places(scene.gateway, scene.partition, "x") == ["succeeded"]


# uploads


@pytest.mark.parametrize(
    ("script", "how"), [*(("upload_chunk", how) for how in UPLOADING), ("upload_events", "import_task")]
)
async def test_a_portion_that_is_uploaded_late_changes_no_task_and_expires(scene: Scene, how: str, script: str) -> None:
    await upload(scene, how, script)
    async for _ in run_to_its_end(scene):
        before = await dump(scene.gateway, scene.namespace)
        await scene.proxy.deliver()
        after = await dump(scene.gateway, scene.namespace)
        (uploaded,) = after.keys() - before.keys()
        assert 0 < await scene.gateway.command("PTTL", uploaded) <= 600_000
        assert {key: value for key, value in after.items() if key != uploaded} == before
        await scene.gateway.command("DEL", uploaded)


async def test_a_late_portion_spoils_no_later_upload_of_the_same_arguments(scene: Scene) -> None:
    await upload(scene, "enqueue", "upload_chunk")
    await scene.settle("succeed", await scene.read(), "y")
    await scene.proxy.deliver()
    await UPLOADING["enqueue_fresh"][0](scene.producer)
    assert (await read_task_input(scene.gateway, scene.partition, "y")).arguments == LARGE


# edits and registrations


async def test_a_dismissal_that_arrives_late_is_logged_twice_at_most(scene: Scene) -> None:
    await scene.enqueue_and_read(*FINDING)
    async with scene.late_producer() as producer:
        handle = await producer.find("x")
        assert handle is not None
        scene.hold("dismiss")
        await handle.dismiss(2)
    await scene.proxy.deliver()
    events = await read_events(scene.gateway, scene.partition, "x")
    assert [(event.type, event.data) for event in events[2:]] == [("dismissed", {"event": 2, "finding": "k"})] * 2


@pytest.mark.parametrize("script", REGISTERING)
async def test_a_process_that_left_keeps_nothing_that_does_not_expire(scene: Scene, script: str) -> None:
    register, deregister, _, mark = REGISTERING[script]
    await register(scene.gateway, scene.namespace)
    await deregister(scene.gateway, scene.namespace)
    assert 0 < await scene.gateway.command("PTTL", mark(scene.namespace)) <= 3_600_000


# tokens of limits


async def test_a_token_that_is_taken_late_expires(scene: Scene) -> None:
    """The task has ended. Until then, fewer tasks start than might."""
    late, store = await hold_bytes(scene, "take_limits")
    assert (await late.take([TakeRequest("a", USES)])).answers[0].granted
    await store.release([ReleaseRequest("a", USES)])
    await scene.proxy.deliver()
    assert (await store.take([TakeRequest("b", USES)])).answers[0].reason == "running"
    clock = scene.namespace.limits.clock
    seen, virtual, *rest = (await scene.gateway.command("GET", clock)).split()
    later = b"%b %d %b" % (seen, int(virtual) + 30_000, b" ".join(rest))
    await scene.gateway.command("SET", clock, later, "PX", 60_000)
    assert (await store.take([TakeRequest("b", USES)])).answers[0].granted
    await store.release([ReleaseRequest("b", USES)])


async def test_a_hold_that_arrives_late_lasts_for_its_time_from_then_on(scene: Scene) -> None:
    late, store = await hold_bytes(scene, "hold_limit")
    until = await late.hold("openai", 5)
    await scene.proxy.deliver()
    (view,) = await store.read(["openai"])
    assert until <= int(view.defined["hold"]) <= view.now + 5_000


# calls whose reply is lost


async def test_a_setting_whose_reply_was_lost_has_changed(scene: Scene) -> None:
    scene.proxy.lose(queue_script("set_config").sha.encode())
    assert await set_config(scene.late, scene.namespace, "lease", 20)
    assert scene.proxy.lost == 1
    assert not await set_config(scene.late, scene.namespace, "lease", 20)


async def test_a_removal_whose_reply_was_lost_says_that_the_session_was_there(scene: Scene) -> None:
    await answered(scene, "one")
    scene.proxy.lose(queue_script("session_forget").sha.encode())
    assert await forget_session(scene.late, address_of(scene))
    assert scene.proxy.lost == 1
    assert not await forget_session(scene.late, address_of(scene))


async def test_a_task_that_is_replaced_while_it_is_cancelled_is_cancelled(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller reads the record again."""
    delivery = await scene.enqueue_and_read()
    handle = await scene.producer.find("x")
    assert handle is not None
    await scene.settle("succeed", delivery)
    pipeline = Gateway.pipeline

    async def replaced(self: Gateway, *arguments: Any, **options: Any) -> Any:
        found = await pipeline(self, *arguments, **options)
        monkeypatch.undo()
        await scene.enqueue_fresh()
        return found

    monkeypatch.setattr(Gateway, "pipeline", replaced)
    assert await handle.cancel() == State.CANCELLED
