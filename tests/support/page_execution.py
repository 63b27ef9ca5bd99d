"""Execution of pages of the documentation, each in a process, a folder and a namespace of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.paths import ROOT


@contextmanager
def use_server(data: Path) -> Iterator[None]:
    """The embedded server of a data directory, which would else start and stop with each command."""
    command = [sys.executable, "-m", "perdure.worker.cli", "server"]
    subprocess.run([*command, "start", "--data-dir", data], check=True, capture_output=True, timeout=60)
    yield
    subprocess.run([*command, "stop", "--force", "--data-dir", data], check=True, capture_output=True, timeout=60)


def run_page(page: Path, folder: Path, data: Path, namespace: str = "") -> subprocess.CompletedProcess[str]:
    """Run the code of a page in a folder, on the server of a data directory, with the interpreter of this process."""
    kept = {name: os.environ[name] for name in os.environ if not name.startswith(("PERDURE_", "PYTHON"))}
    environment = kept | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONPYCACHEPREFIX": str(data / "pycache"),  # each command would else compile the package again
        "PERDURE_DATA_DIR": str(data),
        "PERDURE_NAMESPACE": namespace or re.sub(r"\W", "-", str(page.relative_to(ROOT).with_suffix(""))).lower(),
        "PERDURE_MEMORY": str(folder / "memory.sqlite3"),
        "PERDURE_LOG_LEVEL": "WARNING",
    }
    return subprocess.run(
        [sys.executable, "-m", "tests.support.run_page", str(page)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
