"""What operators set for limits: in force at once, undone by nothing that arrives late, noted with who did it."""

from __future__ import annotations

import pytest
from perdure.queues import Gateway, Namespace
from perdure.queues.envelope import LimitUse
from perdure.queues.limits.control import LimitControl, note_breaker, read_notes, read_setting
from perdure.queues.limits.definition import Limit
from perdure.queues.limits.store import BreakerChange, LimitStore, TakeRequest
from perdure.queues.security.encryption import Encryptor
from perdure.queues.transport.pipelining import Argument
from perdure.queues.transport.scripts import queue_script

pytestmark = pytest.mark.integration

SET = queue_script("set_limit")
OPENAI = Limit("openai", total=2)


async def publish(gateway: Gateway, namespace: Namespace) -> LimitStore:
    store = LimitStore(gateway, namespace)
    await store.publish([OPENAI], "shop", starts=True)
    return store


async def takes(store: LimitStore, *members: str) -> list[bool]:
    requests = [TakeRequest(f"q/0/{member}/n", [LimitUse("openai", "-")]) for member in members]
    return [answer.granted for answer in (await store.take(requests)).answers]


def control(gateway: Gateway, namespace: Namespace, by: str = "ada") -> LimitControl:
    return LimitControl(gateway, namespace, "openai", by=by)


async def test_a_number_of_an_operator_is_in_force_until_it_is_reset(gateway: Gateway, namespace: Namespace) -> None:
    store = await publish(gateway, namespace)
    await control(gateway, namespace).set(read_setting("total", "1"), "total=1")
    assert await takes(store, "a", "b") == [True, False]
    await control(gateway, namespace).set(read_setting("total", "none"), "total=none")
    assert await takes(store, "b", "c") == [True, True]
    await control(gateway, namespace).set(read_setting("total", ""), "total=")
    assert await takes(store, "d") == [False]


async def test_a_reset_leaves_nothing_that_does_not_expire(gateway: Gateway, namespace: Namespace) -> None:
    await publish(gateway, namespace)
    key = namespace.limits.control("openai")
    await control(gateway, namespace).set(read_setting("total", "1"), "total=1")
    assert await gateway.command("PTTL", key) == -1
    await control(gateway, namespace).set(read_setting("total", ""), "total=")
    assert 0 < await gateway.command("PTTL", key) <= 3_600_000
    until = await control(gateway, namespace).hold(7200)
    assert until > 0
    assert await gateway.command("PTTL", key) > 7_200_000
    assert await gateway.command("PTTL", namespace.limits.audit) > 0


async def test_a_change_that_was_made_already_is_not_made_again(gateway: Gateway, namespace: Namespace) -> None:
    """A call whose reply was lost is sent again; its bytes arrive once more after the change of another operator."""
    await publish(gateway, namespace)
    args: list[Argument] = ["openai", "0", "token", "0", "", "9", b"{}", "total", "1"]
    for _ in range(2):
        assert await gateway.run(SET, [namespace.limits.clock], args) == [1, 0]
    assert await gateway.command("XLEN", namespace.limits.audit) == 1
    await control(gateway, namespace).set(read_setting("total", "5"), "total=5")
    assert await gateway.run(SET, [namespace.limits.clock], args) == [0, 0]
    assert await gateway.command("HGET", namespace.limits.control("openai"), "total") == b"5"


async def test_a_hold_is_in_force_and_ends_with_a_release(gateway: Gateway, namespace: Namespace) -> None:
    store = await publish(gateway, namespace)
    first = await control(gateway, namespace).hold(600)
    assert await control(gateway, namespace).hold(5) == first
    assert await store.hold("openai", 900) > first
    assert await takes(store, "a") == [False]
    await control(gateway, namespace).release()
    assert await takes(store, "a") == [True]
    notes = await read_notes(gateway, namespace, "openai")
    assert [note.what for note in notes] == ["release", "hold for 5.0 s", "hold for 10 min"]


async def test_a_late_hold_does_not_follow_a_release(gateway: Gateway, namespace: Namespace) -> None:
    store = await publish(gateway, namespace)
    args: list[Argument] = ["openai", "0", "token", "60000", "", "9", b"{}"]
    stored, until = await gateway.run(SET, [namespace.limits.clock], args)
    assert (stored, until > 0) == (1, True)
    await control(gateway, namespace).release()
    assert await gateway.run(SET, [namespace.limits.clock], args) == [0, 0]
    assert await takes(store, "a") == [True]


async def test_notes_are_encrypted_and_say_who_did_what_and_why(gateway: Gateway, namespace: Namespace) -> None:
    gateway.encryptor = Encryptor([b"k" * 32])
    await control(gateway, namespace).set(read_setting("total", "1"), "set total=1", "incident 7")
    await note_breaker(gateway, namespace, [BreakerChange("openai", "open", 1, 20, 12)])
    await LimitControl(gateway, namespace, "other", by="bob").hold(60)
    stored = await gateway.command("XRANGE", namespace.limits.audit, "-", "+")
    assert b"incident" not in repr(stored).encode()
    newest, oldest = await read_notes(gateway, namespace, "openai")
    assert (oldest.by, oldest.what, oldest.why) == ("ada", "set total=1", "incident 7")
    assert (newest.by, newest.what) == ("", "breaker opened: 12 of 20 calls failed")
    assert newest.at >= oldest.at > 0
    assert [note.limit for note in await read_notes(gateway, namespace)] == ["other", "openai", "openai"]
    gateway.encryptor = Encryptor([b"x" * 32])
    assert "could not be read" in (await read_notes(gateway, namespace, "openai"))[0].what


async def test_a_breaker_that_opens_again_and_again_is_noted_once(gateway: Gateway, namespace: Namespace) -> None:
    for _ in range(3):
        await note_breaker(gateway, namespace, [BreakerChange("openai", "open", 1, 20, 12)])
        await note_breaker(gateway, namespace, [BreakerChange("crm", "open", 1, 2, 1)])
    await note_breaker(gateway, namespace, [BreakerChange("openai", "closed")])
    await note_breaker(gateway, namespace, [BreakerChange("openai", "open", 1, 20, 10)])
    assert [note.what for note in await read_notes(gateway, namespace, "openai")] == [
        "breaker opened: 10 of 20 calls failed",
        "breaker closed: its probe succeeded",
        "breaker opened: 12 of 20 calls failed",
    ]


async def test_what_another_program_put_under_the_keys_is_moved_away(
    gateway: Gateway, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "patience", 0.0)  # no other process moves them first
    keys = namespace.limits
    for key in (keys.control("openai"), keys.limit("openai"), keys.audit):
        await gateway.command("SET", key, "foreign", "PX", 60_000)
        await control(gateway, namespace).set(read_setting("total", "1"), "total=1")
        assert await gateway.command("TYPE", key) in (b"hash", b"stream", b"none")
    assert await gateway.command("HGET", keys.control("openai"), "total") == b"1"


async def test_the_token_of_one_task_is_taken_and_no_other(gateway: Gateway, namespace: Namespace) -> None:
    store = await publish(gateway, namespace)
    assert await takes(store, "a", "ab", "c") == [True, True, False]
    released = await control(gateway, namespace).release_task("a")
    assert released is not None
    assert await control(gateway, namespace).release_task("a") is None
    (view,) = await store.read(["openai"])
    assert [holder.member for holder in view.holders] == ["q/0/ab/n"]
