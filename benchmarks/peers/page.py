"""`python -m benchmarks.peers.page`: write docs/explanation/benchmarks.md and its charts from stored results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import results
from .bars import bars_of
from .chart import chart
from .page_text import GUARANTEES, HOW_TO_READ, INEQUALITIES, LIMITS, SECTIONS, SWEEP, TITLE, conditions
from .results import Data
from .summary import with_summary
from .tables import cell_table, guarantee_table, overview, settings_table, sweep_table
from .target_table import reached

_ROOT = Path(__file__).parents[2]
_DOCS = _ROOT / "docs" / "explanation"
_DATA = _DOCS / "benchmarks"


def main(
    peers: Annotated[Path, typer.Option(help="Output of `python -m benchmarks.peers`.")] = _DATA / "results.json",
    own: Annotated[Path, typer.Option(help="Output of `python -m benchmarks --json`.")] = _DATA / "perdure.json",
    fsync: Annotated[Path, typer.Option(help="Output of the same command with --fsync.")] = _DATA
    / "perdure-fsync.json",
    readme: Annotated[Path, typer.Option(help="The document with the sentence on no-op tasks.")] = _ROOT / "README.md",
    page: Annotated[Path, typer.Option(help="The page to write; charts go to `benchmarks/` beside it.")] = _DOCS
    / "benchmarks.md",
) -> None:
    """Write the page. Rows whose file is missing have no figures."""
    data = results.read(peers)
    runs = {"peers": data} | {name: results.read(path) for name, path in _there(own=own, fsync=fsync)}
    charts = page.parent / "benchmarks"
    charts.mkdir(parents=True, exist_ok=True)
    for line in data["lines"]:
        subtitle = f"{line['unit']}; {'shorter' if line['less'] else 'longer'} is better"
        (charts / f"{line['key']}.svg").write_text(chart(line["title"], subtitle, bars_of(line, data)))
    page.write_text("\n".join(_page(data, runs)))
    if any(line["key"] == "noop" for line in data["lines"]):
        readme.write_text(with_summary(readme.read_text("utf-8"), data), "utf-8")


def _there(**files: Path) -> list[tuple[str, Path]]:
    return [(name, path) for name, path in files.items() if path.exists()]


def _page(data: Data, runs: dict[str, Data]) -> list[str]:
    parts = [TITLE, "## Conditions\n", HOW_TO_READ, "## Known inequalities\n", INEQUALITIES]
    parts += ["## Perdure's targets\n", *reached(runs)]
    lines = {line["key"]: line for line in data["lines"]}
    for title, keys, promises, text in SECTIONS:
        found = [lines[key] for key in keys if key in lines]
        if not found:
            continue
        parts += [f"## {title}\n", text, *overview(found, data)]
        for line in found:
            parts += [
                f"### {line['title']}\n",
                f"![{line['title']}](benchmarks/{line['key']}.svg)\n",
                f"Measured: {line['how']}.\n",
                *conditions(line),
                *cell_table(line, data, promises),
            ]
    left_out = [key for _, keys, _, _ in SECTIONS for key in keys if key not in lines]
    parts += ["## Guarantees of each setup\n", GUARANTEES, *guarantee_table(data)]
    parts += ["## Settings that were tried\n", SWEEP, *sweep_table(data)]
    parts += ["## Settings and versions\n", *settings_table(data)]
    parts += ["## Not measured\n", LIMITS]
    if left_out:
        parts += [f"Benchmarks that this page has no run of: {', '.join(f'`{key}`' for key in left_out)}.\n"]
    return parts


if __name__ == "__main__":
    typer.run(main)
