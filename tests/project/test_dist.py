"""The distributions of a release: their links work on a package index, and they are not built without an address."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from tests.support.paths import ROOT

ADDRESS = "https://example.org/perdure"
RELATIVE = re.compile(r"\]\((?!https://|#)[^)]*\)")


def build(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / ".ci" / "dist.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_metadata_have_the_address(tmp_path: Path) -> None:
    before = (ROOT / "README.md").read_bytes(), (ROOT / "pyproject.toml").read_bytes()
    built = build(ADDRESS, str(tmp_path))
    assert built.returncode == 0, built.stderr
    assert before == ((ROOT / "README.md").read_bytes(), (ROOT / "pyproject.toml").read_bytes())
    (wheel,) = tmp_path.glob("perdure-*.whl")
    (source,) = tmp_path.glob("perdure-*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
        assert "perdure/queues/lua/enqueue.lua" in archive.namelist()
    version = metadata["Version"]
    assert dict(url.split(", ") for url in metadata.get_all("Project-URL", [])) == {
        "Repository": ADDRESS,
        "Documentation": f"{ADDRESS}/blob/v{version}/docs/README.md",
        "Changelog": f"{ADDRESS}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{ADDRESS}/issues",
    }
    description = metadata.get_payload()
    assert isinstance(description, str)
    assert f"]({ADDRESS}/blob/v{version}/docs/tutorial/first-task.md)" in description
    assert RELATIVE.findall(description) == []
    assert RELATIVE.findall((ROOT / "README.md").read_text("utf-8")), "in the repository they stay relative"
    with tarfile.open(source) as archive_:
        assert any(name.endswith("/queues/lua/enqueue.lua") for name in archive_.getnames())


def test_nothing_is_built_without_an_address(tmp_path: Path) -> None:
    for address in ("", "example.org/perdure", "http://example.org/perdure", "https://example.org"):
        refused = build(address, str(tmp_path))
        assert refused.returncode == 1
        assert refused.stderr.startswith(f"REPOSITORY must be the public address of the repository, got {address!r}")
    assert list(tmp_path.iterdir()) == []
