"""The state of supervisors in Redis: crashes in a window, pauses that outlive them, and the list of supervisors."""

from __future__ import annotations

import anyio
from perdure.queues import Gateway, Namespace, SupervisorInfo, list_supervisors
from perdure.queues.supervisors import (
    ChildInfo,
    SupervisorState,
    count_crash,
    paused_supervisors,
    resume_supervisor,
    supervise,
    withdraw_supervisor,
)

from tests.support.consumers import needs_server

INFO = SupervisorInfo(
    id="app-host-1",
    name="app-host",
    app="app",
    host="host",
    pid=1,
    version="0",
    processes=2,
    children=(ChildInfo(2, "worker", "working", "w-2"), ChildInfo(3, "isolated", "idle", "w-3")),
    window=60.0,
)


async def crash(
    gateway: Gateway,
    namespace: Namespace,
    worker: str,
    *,
    name: str = "app-host",
    threshold: int = 2,
    window: float = 60,
) -> SupervisorState:
    return await count_crash(gateway, namespace, name, worker, why=f"{worker} died", threshold=threshold, window=window)


async def test_a_crash_above_the_limit_pauses(gateway: Gateway, namespace: Namespace) -> None:
    first, second, third, fourth = [await crash(gateway, namespace, f"w{number}") for number in range(4)]
    assert [(state.crashes, state.paused) for state in (first, second)] == [(1, False), (2, False)]
    assert (third.crashes, third.paused, third.why) == (3, True, "w2 died")
    assert (fourth.crashes, fourth.paused_since, fourth.why) == (4, third.paused_since, "w2 died")
    assert await paused_supervisors(gateway, namespace) == ["app-host"]


async def test_a_crash_that_is_reported_twice_is_counted_once(gateway: Gateway, namespace: Namespace) -> None:
    await crash(gateway, namespace, "same")
    state = await crash(gateway, namespace, "same")
    assert (state.crashes, state.paused) == (1, False)


async def test_each_name_has_a_counter_of_its_own(gateway: Gateway, namespace: Namespace) -> None:
    await crash(gateway, namespace, "w1", threshold=0)
    other = await crash(gateway, namespace, "w2", name="other")
    assert (other.crashes, other.paused) == (1, False)


async def test_crashes_expire_with_the_window_and_a_pause_does_not(gateway: Gateway, namespace: Namespace) -> None:
    await gateway.command("ZADD", namespace.crashes("app-host"), 1, "long-ago")
    assert (await crash(gateway, namespace, "w1", threshold=1)) == SupervisorState(1, 0, "")
    paused = await crash(gateway, namespace, "w2", threshold=1)
    assert (paused.crashes, paused.why) == (2, "w2 died")
    await gateway.command("ZADD", namespace.crashes("app-host"), 1, "w1", 1, "w2")
    assert await crash(gateway, namespace, "w3", threshold=1) == paused._replace(crashes=1)
    await gateway.command("ZADD", namespace.crashes("app-host"), 1, "w3")
    assert await supervise(gateway, namespace, INFO, 15) == paused._replace(crashes=0)


async def test_a_resumed_supervisor_counts_from_zero(gateway: Gateway, namespace: Namespace) -> None:
    await crash(gateway, namespace, "w1", threshold=0)
    assert await resume_supervisor(gateway, namespace, "app-host")
    assert not await resume_supervisor(gateway, namespace, "app-host")
    assert await paused_supervisors(gateway, namespace) == []
    assert await supervise(gateway, namespace, INFO, 15) == SupervisorState(0, 0, "")
    assert (await crash(gateway, namespace, "w2", threshold=1)).crashes == 1


async def test_a_supervisor_that_starts_again_is_still_paused(gateway: Gateway, namespace: Namespace) -> None:
    paused = await crash(gateway, namespace, "w1", threshold=0)
    assert await supervise(gateway, namespace, INFO, 15) == paused


async def test_the_list_shows_running_and_paused_supervisors(gateway: Gateway, namespace: Namespace) -> None:
    await supervise(gateway, namespace, INFO, 15)
    await crash(gateway, namespace, "w1", threshold=5)
    state = await crash(gateway, namespace, "w2", name="left-behind", threshold=0)
    here, gone = await list_supervisors(gateway, namespace)
    assert (here.id, here.children, here.crashes, here.paused_since) == (INFO.id, INFO.children, 1, 0)
    assert here.seen is not None
    assert here.started > 0
    assert (gone.name, gone.seen, gone.crashes, gone.paused_since) == ("left-behind", None, 1, state.paused_since)
    assert gone.summary()["why"] == "w2 died"
    await withdraw_supervisor(gateway, namespace, INFO.id)
    assert [info.name for info in await list_supervisors(gateway, namespace)] == ["left-behind"]


async def test_a_silent_supervisor_is_not_listed(gateway: Gateway, namespace: Namespace) -> None:
    await supervise(gateway, namespace, INFO, 0.05)
    await anyio.sleep(0.1)
    assert await list_supervisors(gateway, namespace) == []


async def test_fields_of_another_version_are_ignored(gateway: Gateway, namespace: Namespace) -> None:
    await supervise(gateway, namespace, INFO, 15)
    reported = b'{"id": "i", "name": "n", "later": 1, "children": [{"pid": 1, "role": "r", "state": "s", "later": 2}]}'
    await gateway.command("HSET", namespace.supervisor(INFO.id), "told", reported)
    [found] = await list_supervisors(gateway, namespace)
    assert (found.name, found.children) == ("n", (ChildInfo(1, "r", "s"),))


async def test_every_key_expires(gateway: Gateway, namespace: Namespace) -> None:
    needs_server(gateway, "its TTLs are not looked at")
    await supervise(gateway, namespace, INFO, 15)
    await crash(gateway, namespace, "w1", threshold=0)
    await supervise(gateway, namespace, INFO, 15)
    name = INFO.name
    keys = (
        namespace.supervisors,
        namespace.supervisor(INFO.id),
        namespace.crashes(name),
        namespace.paused,
        namespace.pause(name),
    )
    assert all([await gateway.command("PTTL", key) > 0 for key in keys])
