"""The virtual environments of the peers, under build/; created again when their requirements change."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from .processes import Failed

__all__ = ["bin_folder", "environment_of", "install"]

_HERE = Path(__file__).parent
_CACHE = Path(__file__).parents[2] / "build" / "peers"
_INSTALLED_WITHIN = 600
_SHOWN = 400


def bin_folder(environment: str | None) -> Path:
    """Return the bin folder of an environment; None is the environment of this process."""
    return Path(sys.executable).parent if environment is None else _CACHE / environment / "bin"


def install(environment: str) -> None:
    """Install the requirements of an environment. Raises Failed with the end of pip's output."""
    requirements = _HERE / "requirements" / f"{environment}.txt"
    folder = _CACHE / environment
    done = folder / "installed.txt"
    wanted = f"{sys.version}\n{requirements.read_text()}"
    if done.exists() and done.read_text() == wanted:
        return
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _run([*pip, "-r", str(requirements)])
    done.write_text(wanted)


def environment_of(environment: str | None, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process: its bin folder first on PATH, and `programs` importable."""
    found = {key: value for key, value in os.environ.items() if not key.startswith(("PERDURE_", "BENCH_", "PYTHON"))}
    path = os.pathsep.join([str(bin_folder(environment)), found.get("PATH", os.defpath)])
    return found | {"PATH": path, "PYTHONPATH": str(_HERE), "PYTHONUNBUFFERED": "1"} | dict(variables)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALLED_WITHIN, check=False)
    except subprocess.TimeoutExpired:
        raise Failed(f"could not install within {_INSTALLED_WITHIN} s") from None
    if done.returncode:
        raise Failed(f"could not install: ...{done.stderr.strip()[-_SHOWN:]}")
