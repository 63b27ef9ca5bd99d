"""Manifest of a workspace: its files, links and folders, and the limits that they keep to.

A path is text with `/` between names, in which the bytes that are not UTF-8 are surrogates, as in `os.listdir`. Modes
are permissions only. A link is its text: it is stored and restored, and never followed.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import orjson

from ...queues.transport.value_store import is_sha256
from ..errors import WorkspaceError, WorkspaceTooLarge

VERSION: Final = 1
"""Format that this code writes, and the latest that it reads."""

IGNORE_FILE: Final = ".perdureignore"
"""File in a workspace with patterns of files that are not saved, one per line."""

FILE_MODE: Final = 0o644
FOLDER_MODE: Final = 0o755
"""Modes that are usual: a folder with this one is listed only if nothing else leads to it."""

MAX_PATH_LENGTH: Final = 1024
_MAX_NAME_LENGTH: Final = 255
"""Largest size of a path and of a name in it, in bytes."""

_MAX_TARGET_LENGTH: Final = 4096
"""Largest size of the text of a link, in bytes."""

_DEEPEST: Final = 64
"""Largest number of folders in which a file is."""

_ROW: Final = 2 * MAX_PATH_LENGTH + 128
"""Mean size of a file's row in the largest manifest, in bytes."""

_ESCAPED: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class SavedFile(NamedTuple):
    """Bytes of a file. hash: SHA-256 in hexadecimal. size: bytes. mode: its permissions."""

    hash: str
    size: int
    mode: int = FILE_MODE


class SavedLink(NamedTuple):
    """A symbolic link.

    Attributes:
        target: Its text.
        inside: Whether it is an absolute path in the workspace: then the target is the rest after the folder's path,
            which is another one in each run.
    """

    target: str
    inside: bool = False


@dataclass(frozen=True, slots=True)
class Manifest:
    """Files, links and folders of a workspace.

    Attributes:
        files, links: By their paths from the workspace's folder.
        folders: Modes of the folders that are empty or have another mode than the usual one.
    """

    files: Mapping[str, SavedFile] = field(default_factory=dict[str, SavedFile])
    links: Mapping[str, SavedLink] = field(default_factory=dict[str, SavedLink])
    folders: Mapping[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def of(cls, files: Mapping[str, SavedFile], links: Mapping[str, SavedLink], folders: Mapping[str, int]) -> Manifest:
        """Return the manifest of a workspace. folders: modes of all of them."""
        used = _parents((*files, *links, *folders))
        listed = {path: mode for path, mode in folders.items() if mode != FOLDER_MODE or path not in used}
        return cls(files, links, listed)

    @property
    def number(self) -> int:
        """Number of files and links."""
        return len(self.files) + len(self.links)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    def all_folders(self) -> dict[str, int]:
        """Return the modes of all folders, each after the one that it is in."""
        usual = dict.fromkeys(_parents((*self.files, *self.links, *self.folders)), FOLDER_MODE)
        return dict(sorted((usual | dict(self.folders)).items()))

    def changed_since(self, former: Manifest) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the paths, as texts, of what was changed and what was removed; those of folders end in `/`."""
        changed, removed = list[str](), list[str]()
        for mine, other in ((self.files, former.files), (self.links, former.links)):
            changed += [shown_path(path) for path, found in mine.items() if other.get(path) != found]
        there = self.files.keys() | self.links.keys()
        removed += [shown_path(path) for path in (former.files.keys() | former.links.keys()) - there]
        if self.folders != former.folders:
            before, after = former.all_folders(), self.all_folders()
            changed += [f"{shown_path(path)}/" for path in self.folders if before.get(path) != after[path]]
            removed += [f"{shown_path(path)}/" for path in former.folders if path not in after]
        return tuple(sorted(changed)), tuple(sorted(removed))


class Limits(NamedTuple):
    """Limits of a workspace, for what is saved and for what is restored.

    bytes: of all files. files: number of files and links, and of folders. file_bytes: of one file.
    """

    bytes: int
    files: int
    file_bytes: int

    @property
    def manifest_bytes(self) -> int:
        """Largest size of a manifest."""
        return 1024 + self.files * _ROW

    def check(self, what: str, path: str, size: int, total: int, files: int) -> None:
        """Raise `WorkspaceTooLarge` if a file of this size, after which these are the totals, exceeds a limit."""
        if size > self.file_bytes:
            raise WorkspaceTooLarge(
                f"{what}: file {path!r} has {size:,} bytes, more than {self.file_bytes:,}; list it in "
                f"{IGNORE_FILE}, or raise PERDURE_ARTIFACT_LIMIT"
            )
        if total > self.bytes:
            raise WorkspaceTooLarge(
                f"{what}: its files have more than {self.bytes:,} bytes; remove some, list them in "
                f"{IGNORE_FILE}, or raise PERDURE_WORKSPACE_LIMIT"
            )
        if files > self.files:
            raise self._too_many(what, "files")

    def check_folders(self, what: str, folders: int) -> None:
        """Raise `WorkspaceTooLarge` if there are more folders than a workspace may have files."""
        if folders > self.files:
            raise self._too_many(what, "folders")

    def check_all(self, what: str, manifest: Manifest) -> None:
        """Raise `WorkspaceTooLarge` if a workspace exceeds a limit."""
        total, number = 0, len(manifest.links)
        self.check(what, "", 0, 0, number)
        for path, file in manifest.files.items():
            total += file.size
            number += 1
            self.check(what, path, file.size, total, number)
        self.check_folders(what, len(manifest.folders))

    def check_manifest(self, what: str, size: int) -> None:
        """Raise `WorkspaceTooLarge` for a manifest of more bytes than that of the largest number of files."""
        if size > self.manifest_bytes:
            raise WorkspaceTooLarge(
                f"{what}: its manifest has {size:,} bytes, more than {self.manifest_bytes:,}; remove files, list their "
                f"folders in {IGNORE_FILE}, or raise PERDURE_WORKSPACE_FILES"
            )

    def _too_many(self, what: str, kind: str) -> WorkspaceTooLarge:
        return WorkspaceTooLarge(
            f"{what}: it has more than {self.files:,} {kind}; remove some, list their folders in "
            f"{IGNORE_FILE}, or raise PERDURE_WORKSPACE_FILES"
        )


def shown_path(path: str) -> str:
    r"""Return a path as text for people and events: control characters and bytes that are not UTF-8 are `\x..`."""
    return _ESCAPED.sub(lambda found: _escape(found[0]), path)


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code - 0xDC00 if 0xDC80 <= code <= 0xDCFF else code:02x}"


def check_path(path: str) -> str | None:
    """Return what is wrong with the path of a file in a workspace, None if it is valid."""
    try:
        size = len(_bytes(path))
    except UnicodeEncodeError:
        return "its name has surrogates that are no bytes"
    if not 0 < size <= MAX_PATH_LENGTH:
        return f"a path must have 1 to {MAX_PATH_LENGTH} bytes, got {size}"
    if "\0" in path:
        return "its name contains a zero byte"
    return _check_names(path.split("/"))


def _check_names(names: Sequence[str]) -> str | None:
    if any(name in ("", ".", "..") for name in names):
        return "a path must stay within the workspace: no '..', and no '/' at its start or end"
    if len(names) > _DEEPEST + 1:
        return f"a file must be in at most {_DEEPEST} folders, got {len(names) - 1}"
    if any(len(_bytes(name)) > _MAX_NAME_LENGTH for name in names):
        return f"a name must have at most {_MAX_NAME_LENGTH} bytes"
    return None


def check_link(link: SavedLink) -> str | None:
    """Return what is wrong with the text of a link, None if it is valid."""
    target, inside = link
    try:
        size = len(_bytes(target))
    except UnicodeEncodeError:
        return "its target has surrogates that are no bytes"
    if size > _MAX_TARGET_LENGTH or "\0" in target or not (target or inside):
        return f"its target must have 1 to {_MAX_TARGET_LENGTH} bytes, without a zero byte"
    if inside and target and any(name in ("", ".", "..") for name in target.split("/")):
        return "its target must stay within the workspace"
    return None


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the stored form; equal manifests have equal forms."""
    files = [[_text(path), *manifest.files[path]] for path in sorted(manifest.files)]
    links = [[_text(path), _text(link.target), link.inside] for path, link in sorted(manifest.links.items())]
    folders = [[_text(path), mode] for path, mode in sorted(manifest.folders.items())]
    return orjson.dumps({"v": VERSION, "files": files, "links": links, "folders": folders})


def decode_manifest(what: str, data: bytes) -> Manifest:
    """Read what `encode_manifest` returned. what: names the workspace in errors.

    Raises `WorkspaceError` for a damaged manifest, one of a later version, and one with a path outside the folder or
    below a link.
    """
    try:
        found = orjson.loads(data)
        version = found["v"]
        if not isinstance(version, int) or version < 1:
            raise ValueError("it has no version")
        if version > VERSION:
            raise WorkspaceError(
                f"{what}: its manifest has version {version}; this version of Perdure reads up to {VERSION}: update it"
            )
        return _decoded(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WorkspaceError(f"{what}: could not read its manifest: {error}") from None


def _decoded(found: Mapping[str, Any]) -> Manifest:
    files, links, folders = dict[str, SavedFile](), dict[str, SavedLink](), dict[str, int]()
    seen = set[str]()

    def new(stored: object) -> str:
        path = _path(stored)
        if (problem := check_path(path)) is not None:
            raise ValueError(f"file {path!r}: {problem}")
        if path in seen:
            raise ValueError(f"file {path!r} is there twice")
        seen.add(path)
        return path

    for stored, digest, size, mode in found["files"]:
        path = new(stored)
        if not is_sha256(digest) or type(size) is not int or size < 0:
            raise ValueError(f"file {path!r} has no hash or no size")
        files[path] = SavedFile(digest, size, _mode(path, mode))
    for stored, target, inside in found["links"]:
        path = new(stored)
        links[path] = SavedLink(_path(target), inside is True)
        if (problem := check_link(links[path])) is not None:
            raise ValueError(f"link {path!r}: {problem}")
    for stored, mode in found["folders"]:
        path = new(stored)
        folders[path] = _mode(path, mode)
    parents = _parents(seen)
    if (both := next((path for path in (*files, *links) if path in parents), None)) is not None:
        raise ValueError(f"{both!r} is {'a link' if both in links else 'a file'} and a folder")
    return Manifest(files, links, folders)


def _mode(path: str, mode: object) -> int:
    if type(mode) is not int or not 0 <= mode <= 0o777:
        raise ValueError(f"file {path!r} has no mode")
    return mode


def _parents(paths: Iterable[str]) -> set[str]:
    """Return the folders in which these paths are."""
    found = set[str]()
    for path in paths:
        outer = path.rpartition("/")[0]
        while outer and outer not in found:
            found.add(outer)
            outer = outer.rpartition("/")[0]
    return found


def _bytes(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")


def _text(path: str) -> str | dict[str, str]:
    """Return the stored form of a path: text, or its bytes if they are not UTF-8."""
    data = _bytes(path)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _path(stored: object) -> str:
    if isinstance(stored, str):
        return stored
    if not isinstance(stored, dict):
        raise TypeError("a path is neither text nor bytes")
    return base64.b64decode(stored["base64"], validate=True).decode("utf-8", "surrogateescape")
