"""Manifest of a workspace: what a store or an imported file may not make a worker write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from perdure.worker.errors import WorkspaceError
from perdure.worker.workspace.manifest import (
    Manifest,
    SavedFile,
    SavedLink,
    decode_manifest,
    encode_manifest,
    shown_path,
)

DIGEST = "0" * 64


def test_a_manifest_is_read_as_it_was_written() -> None:
    manifest = Manifest(
        {
            "run.sh": SavedFile(DIGEST, 4, 0o755),
            "src/a\nb.txt": SavedFile("f" * 64, 0),
            "key\udc80": SavedFile(DIGEST, 1, 0o600),
        },
        {"lib64": SavedLink("lib"), "out\udcff": SavedLink("/etc/\udc80"), "in": SavedLink("src", inside=True)},
        {"refs/heads": 0o755, "private": 0o700},
    )
    assert decode_manifest("the workspace", encode_manifest(manifest)) == manifest


def test_only_folders_that_nothing_leads_to_or_of_unusual_modes_are_listed() -> None:
    folders = {"src": 0o755, "refs": 0o755, "refs/heads": 0o755, "private": 0o700, "links": 0o755}
    manifest = Manifest.of(
        {"src/a": SavedFile(DIGEST, 1), "private/b": SavedFile(DIGEST, 1)}, {"links/c": SavedLink("/")}, folders
    )
    assert manifest.folders == {"refs/heads": 0o755, "private": 0o700}
    assert manifest.all_folders() == folders


def test_changes_are_named_as_text() -> None:
    file, link = SavedFile(DIGEST, 1), SavedLink("a")
    former = Manifest.of({"a": file, "b": file, "d/f": file}, {"l": link}, {"d": 0o755, "e": 0o755})
    after = Manifest.of(
        {"a": file._replace(mode=0o600), "e/new\n\udc80": file}, {"l": SavedLink("b")}, {"d": 0o755, "e": 0o755}
    )
    assert after.changed_since(former) == (("a", "e/new\\x0a\\x80", "l"), ("b", "d/f"))
    assert Manifest().changed_since(Manifest.of({}, {}, {"x": 0o755})) == ((), ("x/",))
    assert Manifest.of({}, {}, {"x": 0o700}).changed_since(Manifest.of({}, {}, {"x": 0o755})) == (("x/",), ())
    assert shown_path("a\x1b[31m\u2028") == "a\\x1b[31m\\x2028"


PATHS = ["", "/etc/passwd", "../a", "src/../../a", "..", ".", "src//a", "src/", "a\x00b"]
LONG = ["x" * 1025, "x" * 256, "d/" * 65 + "x"]


@pytest.mark.parametrize("kind", ["files", "links", "folders"])
@pytest.mark.parametrize("path", PATHS + LONG)
def test_a_path_outside_the_folder_is_refused(path: str, kind: str) -> None:
    found: dict[str, Any] = {"files": {"fine.txt": SavedFile(DIGEST, 1)}, "links": {}, "folders": {}}
    found[kind][path] = {"files": SavedFile(DIGEST, 1), "links": SavedLink("a"), "folders": 0o755}[kind]
    with pytest.raises(WorkspaceError, match="could not read its manifest: file "):
        decode_manifest("the workspace", encode_manifest(Manifest(**found)))


@pytest.mark.parametrize(
    "damage",
    [
        lambda found: found.update(v=0),
        lambda found: found.pop("files"),
        lambda found: found.pop("links"),
        lambda found: found.pop("folders"),
        lambda found: found["files"].append(["b.txt", "../../secret", 1, 0]),
        lambda found: found["files"].append(["b.txt", DIGEST, -1, 0]),
        lambda found: found["files"].append([7, DIGEST, 1, 0]),
        lambda found: found["files"].append([{"base64": "?"}, DIGEST, 1, 0]),
        lambda found: found["files"].append([{"base64": "Li4vYQ=="}, DIGEST, 1, 0]),
        lambda found: found["files"].append([{"base64": "YS50eHQ="}, DIGEST, 1, 0]),
        lambda found: found["files"].append(["b.txt", DIGEST + "\n", 1, 0]),
        lambda found: found["files"].append(["b.txt", DIGEST, True, 0]),
        lambda found: found["files"].append(["b.txt", DIGEST, 1, 0o4755]),
        lambda found: found["files"].append(["b.txt", DIGEST, 1, True]),
        lambda found: found["files"].append(["a.txt", DIGEST, 1, 0]),
        lambda found: found["files"].append(["a.txt/b", DIGEST, 1, 0]),
        lambda found: found["links"].append(["a.txt", "b", False]),
        lambda found: found["links"].append(["b", "", False]),
        lambda found: found["links"].append(["b", "c\0", False]),
        lambda found: found["links"].append(["b", "c" * 4097, False]),
        lambda found: found["links"].append(["b", "../../etc", True]),
        lambda found: found["links"].append(["b", "/etc", True]),
        lambda found: found["links"].append(["b", 7, False]),
        lambda found: (found["links"].append(["b", "/etc", False]), found["files"].append(["b/c", DIGEST, 1, 0])),
        lambda found: (found["links"].append(["b", "/etc", False]), found["folders"].append(["b/c", 0o755])),
        lambda found: (found["links"].append(["b", "/etc", False]), found["links"].append(["b/c", "d", False])),
        lambda found: found["folders"].append(["a.txt", 0o755]),
        lambda found: found["folders"].append(["b", 0o1777]),
    ],
)
def test_a_damaged_manifest_is_an_error(damage: Callable[[dict[str, Any]], object]) -> None:
    found = orjson.loads(encode_manifest(Manifest({"a.txt": SavedFile(DIGEST, 1)})))
    damage(found)
    with pytest.raises(WorkspaceError, match="the workspace: could not read its manifest"):
        decode_manifest("the workspace", orjson.dumps(found))


def test_a_manifest_of_a_later_version_is_named() -> None:
    data = encode_manifest(Manifest()).replace(b'"v":1', b'"v":2')
    with pytest.raises(WorkspaceError, match=r"version 2; this version of Perdure reads up to 1: update it"):
        decode_manifest("the workspace", data)
