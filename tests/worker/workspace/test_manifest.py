"""Manifest of a workspace: what a store or an imported file may not make a worker write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from perdure.worker.errors import WorkspaceError
from perdure.worker.workspace.scan import SavedFile, decode_manifest, encode_manifest

DIGEST = "0" * 64


def test_a_manifest_is_read_as_it_was_written() -> None:
    files = {"run.sh": SavedFile(DIGEST, 4, executable=True), "src/a.txt": SavedFile("f" * 64, 0)}
    assert decode_manifest("the workspace", encode_manifest(files)) == files


PATHS = ["", "/etc/passwd", "../a", "src/../../a", "..", ".", "src//a", "src/", "a\nb", "a\x00b"]
LONG = ["x" * 1025, "x" * 256, "d/" * 65 + "x"]


@pytest.mark.parametrize("path", PATHS + LONG)
def test_a_path_outside_the_folder_is_refused(path: str) -> None:
    data = encode_manifest({"fine.txt": SavedFile(DIGEST, 1), path: SavedFile(DIGEST, 1)})
    with pytest.raises(WorkspaceError, match="could not read its manifest: file "):
        decode_manifest("the workspace", data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda found: found.update(v=0),
        lambda found: found.pop("files"),
        lambda found: found["files"].append(["b.txt", "../../secret", 1, False]),
        lambda found: found["files"].append(["b.txt", DIGEST, -1, False]),
        lambda found: found["files"].append([7, DIGEST, 1, False]),
        lambda found: found["files"].append(["b.txt", DIGEST + "\n", 1, False]),
        lambda found: found["files"].append(["b.txt", DIGEST, True, False]),
        lambda found: found["files"].append(["a.txt", DIGEST, 1, False]),
        lambda found: found["files"].append(["a.txt/b", DIGEST, 1, False]),
    ],
    ids=["version", "no files", "hash", "size", "path", "hash and more", "no number", "twice", "below a file"],
)
def test_a_damaged_manifest_is_an_error(damage: Callable[[dict[str, Any]], object]) -> None:
    found = orjson.loads(encode_manifest({"a.txt": SavedFile(DIGEST, 1)}))
    damage(found)
    with pytest.raises(WorkspaceError, match="the workspace: could not read its manifest"):
        decode_manifest("the workspace", orjson.dumps(found))


def test_a_manifest_of_a_later_version_is_named() -> None:
    data = encode_manifest({}).replace(b'"v":1', b'"v":2')
    with pytest.raises(WorkspaceError, match=r"version 2; this version of Perdure reads up to 1: update it"):
        decode_manifest("the workspace", data)
