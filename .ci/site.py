"""Hooks of the site of the documentation (mkdocs.yml): its navigation, and the files outside docs/ that pages link to.

The navigation is the index, docs/README.md: its headings are the menus, its entries the pages. A linked file outside
docs/ becomes part of the site, in the folder `repository`: Markdown as a page, everything else as a page with its text.
So all links work without a network, whatever the public address of the repository is. Beside each page stands its
Markdown, as llms.txt names it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from perdure.worker.cli.docs import INDEX, pages, without_comments

ROOT = Path(__file__).resolve().parents[1]

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^()\s#]+)(?=[)#])")
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".lua": "lua",
    ".toml": "toml",
    ".sh": "sh",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = _navigation((ROOT / INDEX).read_text("utf-8"))
    return config


def _navigation(index: str) -> list[Any]:
    nav: list[Any] = [{"Index": "README.md"}]
    for page in pages(index):
        below = nav
        for section in page.sections:
            known = next((entry[section] for entry in below if section in entry), None)
            if known is None:
                known = []
                below.append({section: known})
            below = known
        below.append({page.title: _source(ROOT / page.path)})
    return nav


def _source(path: Path) -> str:
    """Return the name of a file in the site's sources."""
    inside = path.relative_to(ROOT)
    if inside.parts[0] == "docs":
        return inside.relative_to("docs").as_posix()
    name = Path("repository", inside)
    return (name if name.suffix == ".md" else name.with_name(f"{name.name}.md")).as_posix()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that pages link to, and the files that they link to in turn."""
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    added: dict[str, Path] = {}
    while waiting:
        for path in _targets(waiting.pop()):
            name = _source(path)
            if name.startswith("repository/") and name not in added:
                added[name] = path
                if path.suffix == ".md":
                    waiting.append(path)
    for library in (ROOT / ".ci" / "vendor").glob("*.js"):
        files.append(File.generated(config, f"assets/{library.name}", abs_src_path=str(library)))
    for name, path in added.items():
        files.append(File.generated(config, name, content=_content(path), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def _targets(page: Path) -> Sequence[Path]:
    text = _FENCE.sub("", page.read_text("utf-8"))
    return [path for link in _LINK.findall(text) if (path := _resolve(page, link)) is not None]


def _resolve(page: Path, link: str) -> Path | None:
    """Return the file that a link of a page leads to; of a folder, its README.md. None: no file, or an image."""
    path = Path(os.path.normpath(page.parent / link))
    path = path / "README.md" if path.is_dir() else path
    return path if path.is_file() and path.is_relative_to(ROOT) and path.suffix not in (".png", ".svg") else None


def _content(path: Path) -> str:
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        return _rewritten(text, path)
    fence = "`" * 5
    return f"# {path.relative_to(ROOT).as_posix()}\n\n{fence}{_LANGUAGES.get(path.suffix, 'text')}\n{text}\n{fence}\n"


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    page.meta["search"] = _search(page.file.src_uri)
    path = page.file.abs_src_path
    return without_comments(_rewritten(markdown, Path(path)) if path else markdown)


def _search(name: str) -> dict[str, Any]:
    """Return how the search of the site treats a page: guides come first, and files that are no pages are left out."""
    if name.startswith("repository/") and not name.endswith("/README.md"):
        return {"exclude": True}
    return {"boost": 2.0 if name.startswith(("how-to/", "tutorial/")) else 1.0}


def _rewritten(text: str, path: Path) -> str:
    """Return the text of a page with links into the site's sources."""
    start = Path(_source(path)).parent
    kept: list[str] = []

    def place(found: re.Match[str]) -> str:
        target = _resolve(path, found[1])
        return found[1] if target is None else os.path.relpath(_source(target), start)

    end = 0
    for fence in _FENCE.finditer(text):
        kept += [_LINK.sub(place, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*kept, _LINK.sub(place, text[end:])])


def on_post_build(config: MkDocsConfig) -> None:
    site = Path(config.site_dir)
    listed = [ROOT / page.path for page in pages((ROOT / INDEX).read_text("utf-8"))]
    for page in {*(ROOT / "docs").rglob("*.md"), *listed}:
        shutil.copy(page, site / _source(page))
    lines = (ROOT / "llms.txt").read_text("utf-8")
    named = re.sub(r"(?<=\]\()([^()\s#]+)", lambda found: _source(ROOT / found[1]), lines)
    (site / "llms.txt").write_text(named, "utf-8")
