"""Late duplicates of changes of identities and shared files: the bytes of a call arrive after a later change."""

from __future__ import annotations

from perdure import Settings
from perdure.worker.agents.identity import Identity, load_identity, set_identity
from perdure.worker.workspace.shared_workspace import SharedWorkspace

from tests.conformance.late import Moments, Scene, Table

WORKSPACES = Table()


@WORKSPACES.case
async def identity(scene: Scene) -> Moments:
    scene.hold("set_identity")
    assert await set_identity(scene.late, scene.namespace, "clerk", Identity(role="first"), by="ada") == 1
    yield
    assert await set_identity(scene.gateway, scene.namespace, "clerk", Identity(role="second"), by="ben") == 2
    yield
    found = await load_identity(scene.gateway, scene.namespace, "clerk")
    assert found is not None
    assert found.identity.role == "second"


@WORKSPACES.each("write", "remove")
async def change_of_a_shared_file(scene: Scene, variant: str) -> Moments:
    settings = Settings(namespace=scene.namespace.name, artifacts=str(scene.folder))
    mine, theirs = (SharedWorkspace(through, settings, "team", by="ada") for through in (scene.late, scene.gateway))
    await theirs.write("a.md", "one")
    scene.hold("put_file")
    await (mine.write("a.md", "two") if variant == "write" else mine.remove("a.md"))
    yield
    await theirs.write("a.md", "three")
    yield
    assert await theirs.read("a.md") == b"three"
