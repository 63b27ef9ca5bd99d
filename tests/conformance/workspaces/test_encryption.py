"""Encryption of identities and shared files: nothing is readable, and nothing that was changed or moved is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from perdure import Settings
from perdure.queues import Encryptor, Gateway, Namespace
from perdure.queues.errors import KeyMissing, NotEncrypted, TamperedData
from perdure.worker.agents.identity import Identity, identity_versions, load_identity, set_identity
from perdure.worker.errors import FileConflict, IdentityConflict
from perdure.worker.workspace.shared_workspace import SharedWorkspace, shared_hashes

KEYED = Encryptor([bytes(range(32))])
HIDDEN = Identity(role="hidden role", policies=("hidden policy",))


@pytest.fixture
def files(gateway: Gateway, namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedWorkspace:
    monkeypatch.setattr(gateway, "encryptor", KEYED)
    return SharedWorkspace(gateway, Settings(namespace=namespace.name, artifacts=str(tmp_path)), "team", by="hidden")


async def test_an_identity_is_encrypted(
    gateway: Gateway, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    await set_identity(gateway, namespace, "clerk", Identity(role="plain"))
    monkeypatch.setattr(gateway, "encryptor", KEYED)
    for _ in range(2):
        assert await set_identity(gateway, namespace, "clerk", HIDDEN, by="hidden", why="hidden", expected=1) == 2
    assert await set_identity(gateway, namespace, "clerk", HIDDEN) == 2, "nothing changed"
    with pytest.raises(IdentityConflict):
        await set_identity(gateway, namespace, "clerk", Identity(), expected=1)
    key = namespace.identity("clerk")
    assert b"hidden" not in repr(await gateway.command("HGETALL", key)).encode()
    found = await identity_versions(gateway, namespace, "clerk")
    assert [(one.identity.role, one.by) for one in found] == [("plain", ""), ("hidden role", "hidden")]
    for name, encryptor, error in (
        ("clerk", Encryptor(), KeyMissing),
        ("thief", KEYED, TamperedData),  # the identity of another agent
    ):
        stored = await gateway.command("HGETALL", key)
        monkeypatch.setattr(gateway, "encryptor", encryptor)
        await gateway.command("HSET", namespace.identity(name), *_flat(stored))
        with pytest.raises(error):
            await load_identity(gateway, namespace, name)
    monkeypatch.setattr(gateway, "encryptor", Encryptor([bytes(range(32))], required=True))
    await gateway.command("HSET", key, "v:2", HIDDEN.model_dump_json())
    with pytest.raises(NotEncrypted):
        await load_identity(gateway, namespace, "clerk")


async def test_the_entry_of_a_shared_file_is_encrypted(
    files: SharedWorkspace, gateway: Gateway, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = await files.write("a.md", "text")
    key = namespace.workspace("team")
    stored = await gateway.command("HGET", key, "f:a.md")
    assert written.hash.encode() not in stored
    assert b"hidden" not in stored
    assert await files.find("a.md") == written
    assert [digest async for digest in shared_hashes(gateway, namespace)] == [written.hash]
    with pytest.raises(FileConflict, match="written by hidden"):
        await files.write("a.md", "other", expected=0)
    await gateway.command("HSET", key, "f:b.md", stored)
    with pytest.raises(TamperedData):
        await files.read("b.md")
    monkeypatch.setattr(gateway, "encryptor", Encryptor([bytes(range(32))], required=True))
    required = SharedWorkspace(gateway, Settings(namespace=namespace.name), "team")
    await gateway.command("HSET", key, "f:c.md", b'1 - {"hash":"' + b"0" * 64 + b'","size":1}')
    with pytest.raises(NotEncrypted):
        await required.find("c.md")


def _flat(fields: object) -> list[bytes]:
    """Return a hash as the arguments of HSET, in whichever form the server's protocol has it."""
    if isinstance(fields, dict):
        return [part for pair in fields.items() for part in pair]
    assert isinstance(fields, list)
    return fields
