"""Identities of agents: versions, compare-and-set, limits."""

from __future__ import annotations

import orjson
import pytest
from perdure.queues import Gateway, Namespace
from perdure.worker.agents.identity import KEPT, Identity, identity_versions, load_identity, set_identity
from perdure.worker.errors import IdentityConflict, IdentityError

FIRST = Identity(role="a clerk", policies=("be kind",), parameters={"limit": 50})


async def test_each_change_is_a_version_with_its_reason(gateway: Gateway, namespace: Namespace) -> None:
    assert await load_identity(gateway, namespace, "clerk") is None
    second = FIRST.model_copy(update={"role": "a manager"})
    assert await set_identity(gateway, namespace, "clerk", FIRST, by="ada", why="start") == 1
    assert await set_identity(gateway, namespace, "clerk", FIRST, by="bob") == 1, "nothing changed"
    assert await set_identity(gateway, namespace, "clerk", second, expected=1, by="bob", why="promoted") == 2
    found = await identity_versions(gateway, namespace, "clerk")
    assert [(one.version, one.identity, one.by, one.why) for one in found] == [
        (1, FIRST, "ada", "start"),
        (2, second, "bob", "promoted"),
    ]
    assert found[0].at is not None
    assert found[1].at is not None
    assert found[0].at <= found[1].at
    assert await load_identity(gateway, namespace, "clerk") == found[1]


async def test_a_change_of_another_version_is_refused(gateway: Gateway, namespace: Namespace) -> None:
    await set_identity(gateway, namespace, "clerk", FIRST, expected=0)
    with pytest.raises(IdentityConflict) as conflict:
        await set_identity(gateway, namespace, "clerk", Identity(role="a thief"), expected=0)
    assert (conflict.value.expected, conflict.value.version) == (0, 1)
    assert len(await identity_versions(gateway, namespace, "clerk")) == 1
    assert await set_identity(gateway, namespace, "clerk", FIRST, expected=0) == 1, "the same call again"
    assert await set_identity(gateway, namespace, "clerk", FIRST, expected=1) == 1
    with pytest.raises(IdentityConflict):
        await set_identity(gateway, namespace, "clerk", FIRST, expected=7)


async def test_the_last_versions_are_kept(gateway: Gateway, namespace: Namespace) -> None:
    for number in range(KEPT + 3):
        await set_identity(gateway, namespace, "clerk", Identity(role=str(number)))
    found = await identity_versions(gateway, namespace, "clerk")
    assert [one.version for one in found] == list(range(4, KEPT + 4))


async def test_an_identity_that_is_too_large_is_refused(gateway: Gateway, namespace: Namespace) -> None:
    with pytest.raises(IdentityError, match="65,536 bytes"):
        await set_identity(gateway, namespace, "clerk", Identity(role="x" * 70_000))
    rest = len(orjson.dumps(Identity().model_dump(mode="json")))
    assert await set_identity(gateway, namespace, "large", Identity(role="x" * (65_536 - rest))) == 1
    await gateway.command("HSET", namespace.identity("clerk"), "version", 1, "v:1", b"{")
    with pytest.raises(IdentityError, match="could not read version 1"):
        await load_identity(gateway, namespace, "clerk")


async def test_an_agent_reads_its_last_identity_though_an_older_one_is_damaged(
    gateway: Gateway, namespace: Namespace
) -> None:
    for role in ("first", "second"):
        await set_identity(gateway, namespace, "bot", Identity(role=role))
    await gateway.command("HSET", namespace.identity("bot"), "v:1", "{")
    found = await load_identity(gateway, namespace, "bot")
    assert found is not None
    assert (found.version, found.identity.role) == (2, "second")
    with pytest.raises(IdentityError, match="version 1"):
        await identity_versions(gateway, namespace, "bot")
