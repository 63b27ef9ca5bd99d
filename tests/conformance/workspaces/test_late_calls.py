"""Late duplicates of changes of identities and shared files: the bytes of a call arrive after a later change."""

from __future__ import annotations

from pathlib import Path

import pytest
from perdure import Settings
from perdure.queues import Gateway, Namespace
from perdure.queues.transport.scripts import queue_script
from perdure.worker.durable.shared_workspace import SharedWorkspace
from perdure.worker.identity import Identity, load_identity, set_identity

from tests.support.lossy_proxy import LossyProxy, deliver_unchanged


async def test_an_identity_that_arrives_late_replaces_no_newer_one(
    gateway: Gateway, namespace: Namespace, line: tuple[Gateway, LossyProxy]
) -> None:
    late, proxy = line
    proxy.hold(queue_script("set_identity").sha.encode())
    assert await set_identity(late, namespace, "clerk", Identity(role="first"), by="ada") == 1
    await deliver_unchanged(gateway, namespace, proxy)
    assert await set_identity(gateway, namespace, "clerk", Identity(role="second"), by="ben") == 2
    await deliver_unchanged(gateway, namespace, proxy)
    found = await load_identity(gateway, namespace, "clerk")
    assert found is not None
    assert found.identity.role == "second"


@pytest.mark.parametrize("act", ["write", "remove"])
async def test_a_change_of_a_shared_file_that_arrives_late_undoes_no_later_one(
    gateway: Gateway, namespace: Namespace, line: tuple[Gateway, LossyProxy], tmp_path: Path, act: str
) -> None:
    late, proxy = line
    settings = Settings(namespace=namespace.name, artifacts=str(tmp_path))
    mine, theirs = (SharedWorkspace(one, settings, "team", by="ada") for one in (late, gateway))
    await theirs.write("a.md", "one")
    proxy.hold(queue_script("put_file").sha.encode())
    await (mine.write("a.md", "two") if act == "write" else mine.remove("a.md"))
    await deliver_unchanged(gateway, namespace, proxy)
    await theirs.write("a.md", "three")
    await deliver_unchanged(gateway, namespace, proxy)
    assert await theirs.read("a.md") == b"three"
