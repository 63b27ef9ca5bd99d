"""Build the distributions of a release: `python .ci/dist.py https://HOST/OWNER/NAME [FOLDER]`, or `make dist`.

The package index shows README.md and the project's links. README.md has links to files beside it, which work in the
repository alone, and the repository does not know its public address. So both are set in a copy of the tracked files:
links lead to the files of the release's tag, and `[project.urls]` names the pages of the repository.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^()\s#]+)")
_FENCE = re.compile(r"^ {0,3}```", re.MULTILINE)


def main(arguments: list[str]) -> None:
    address, folder = (*arguments, "", "")[:2]
    parts = urlsplit(address)
    if parts.scheme != "https" or not parts.netloc or parts.query or parts.fragment or not parts.path.strip("/"):
        sys.exit(
            f"REPOSITORY must be the public address of the repository, got {address!r}: the package index needs links "
            "that lead there; make dist REPOSITORY=https://HOST/OWNER/NAME"
        )
    output = Path(folder or ROOT / "dist").resolve()
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "perdure"
        copy_tracked(copy)
        set_address(copy, address.rstrip("/"))
        for kind in ("sdist", "wheel"):
            build = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
            subprocess.run([sys.executable, "-c", build, str(output)], cwd=copy, check=True, stdout=subprocess.DEVNULL)


def copy_tracked(to: Path) -> None:
    """Copy the tracked files of the working tree."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.decode()  # noqa: S607
    for name in filter(None, names.split("\0")):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name)


def set_address(copy: Path, address: str) -> None:
    """Set the links of README.md and the project's URLs to the pages of a repository."""
    project = copy / "pyproject.toml"
    text = project.read_text("utf-8")
    version = tomllib.loads(text)["project"]["version"]
    files = f"{address}/blob/v{version}"
    urls = {
        "Repository": address,
        "Documentation": f"{files}/docs/README.md",
        "Changelog": f"{files}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
    table = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    project.write_text(f"{text}\n[project.urls]\n{table}", "utf-8")
    readme = copy / "README.md"
    readme.write_text(absolute(readme.read_text("utf-8"), files), "utf-8")


def absolute(text: str, files: str) -> str:
    """Return Markdown with absolute links in place of those to files of the repository, except in code blocks."""
    parts = _FENCE.split(text)
    for number in range(0, len(parts), 2):
        for name in _LINK.findall(parts[number]):
            if not (ROOT / name).exists():
                sys.exit(f"README.md has a link to {name}, which does not exist")
        parts[number] = _LINK.sub(lambda found: f"{files}/{found[1]}", parts[number])
    return "```".join(parts)


if __name__ == "__main__":
    main(sys.argv[1:])
