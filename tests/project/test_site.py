"""The site of the documentation: built without a network, all links work as files, the search has all pages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from perdure.worker.cli.docs import INDEX, pages

from tests.support.paths import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Whatever the build asks a proxy for fails."""
    folder = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | nowhere | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def html(site: Path) -> Iterator[tuple[Path, str]]:
    for page in site.rglob("*.html"):
        if page.name != "404.html":  # its links begin at the root of a server
            yield page, page.read_text("utf-8")


def test_every_link_leads_to_a_file_of_the_site(site: Path) -> None:
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in html(site)}
    broken = []
    for page, text in html(site):
        for link in re.findall(r'<a [^>]*\bhref="([^"]+)"', text):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = unquote(link).partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.is_file() or (anchor and anchor not in anchors.get(target, {anchor})):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    loaded = {
        address
        for _, text in html(site)
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", text)
        for address in re.findall(r'(?:src|href)="(https?:)?//[^"]*"', tag)
    }
    assert loaded == set()


def test_the_navigation_is_the_index(site: Path) -> None:
    start = (site / "index.html").read_text("utf-8")
    for page in pages((ROOT / INDEX).read_text("utf-8")):
        name = page.path.removeprefix("docs/") if page.path.startswith("docs/") else f"repository/{page.path}"
        name = re.sub(r"README\.md$", "index.md", name)
        assert re.search(rf'<a href="{name.removesuffix(".md")}\.html" class="md-nav__link', start), page.path


def test_the_search_has_every_page_and_works_without_a_server(site: Path) -> None:
    script = (site / "search" / "search_index.js").read_text("utf-8")
    found = {entry["location"].partition("#")[0] for entry in json.loads(script.partition("=")[2])["docs"]}
    built = {page.relative_to(site).as_posix() for page, _ in html(site)}
    assert {page for page in built if not page.startswith("repository/")} <= found
    assert "repository/examples/index.html" in found
    assert "repository/llms.txt.html" in built - found


def test_agents_find_the_list_and_the_markdown_that_it_names(site: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", (site / "llms.txt").read_text("utf-8"))
    assert len(links) > 50
    assert {link for link in links if not (site / link).is_file()} == set()
    assert (site / "how-to" / "limits.md").read_text("utf-8") == (ROOT / "docs/how-to/limits.md").read_text("utf-8")
