"""Run the tests of adapters, each in an environment of its own: `python -m tests.adapters [--at AT] [NAME ...]`."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Final, Literal, NamedTuple

ROOT: Final = Path(__file__).parents[2]
BUILD: Final = ROOT / "build" / "adapters"

At = Literal["newest", "lowest"]


class Adapter(NamedTuple):
    """An adapter and what its tests need.

    Attributes:
        extra: extra of the package; empty without one.
        module: module of the adapter, which mypy checks; empty to check none.
        packages: further packages of its tests.
        sources: packages whose source distribution has tests that are run.
        python: lowest minor version of Python.
        pages: names of how-to pages whose code runs in the environment of the adapter only.
    """

    extra: str
    module: str
    packages: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    python: int = 11
    pages: tuple[str, ...] = ()


ADAPTERS: Final[dict[str, Adapter]] = {
    "arq": Adapter(
        extra="",
        module="perdure.worker.integrations.arq",
        packages=("arq>=0.26", "cronsim", "devtools", "httpx", "msgpack"),  # arq: its version names the examples
        sources=("arq",),
    ),
    "langgraph": Adapter(
        extra="langgraph",
        module="perdure.worker.integrations.langgraph",
        packages=(
            "langgraph-checkpoint-conformance",
            "langgraph-checkpoint-postgres",  # imported by the tests of LangGraph, without a server
            "langgraph-checkpoint-sqlite",
            "psycopg[binary,pool]",
            "pycryptodome",
            "pytest-mock",
            "syrupy",
        ),
        sources=("langgraph", "langgraph-checkpoint", "langgraph-checkpoint-sqlite"),
        pages=("langgraph",),
    ),
    "celery": Adapter(extra="", module="", packages=("celery>=5.4",), pages=("celery",)),
    "openai_agents": Adapter(
        extra="openai-agents",
        module="perdure.integrations.openai_agents",
        pages=("openai-agents",),
        sources=("openai-agents",),
    ),
    "pydantic_ai": Adapter(
        extra="pydantic-ai",
        module="perdure.worker.integrations.pydantic_ai",
        pages=("pydantic-ai",),
    ),
    "ag_ui": Adapter(extra="", module="", packages=("ag-ui-protocol>=1", "ag-ui-validate>=0.4")),
    "a2a": Adapter(extra="", module="", packages=("a2a-sdk[http-server]>=1.3", "a2a-lint>=0.1.1")),
    "mcp": Adapter(extra="mcp", module="perdure.worker.integrations.mcp", pages=("mcp",)),
    "claude_agent_sdk": Adapter(
        extra="claude-agent-sdk", module="perdure.worker.integrations.claude_agent_sdk", pages=("claude-agent-sdk",)
    ),
    "django": Adapter(
        extra="django", module="perdure.worker.integrations.django", sources=("django",), pages=("django",), python=12
    ),
    "sqlalchemy": Adapter(
        extra="sqlalchemy",
        module="perdure.worker.integrations.sqlalchemy",
        packages=("aiosqlite", "greenlet", "psycopg[binary]>=3.2", "pgserver>=0.1.4; python_version < '3.13'"),
        pages=("outbox",),
    ),
}


def find_python(minor: int) -> str | None:
    """Return an interpreter of Python 3.MINOR or newer: this one, one of PATH, or one of pyenv."""
    if sys.version_info >= (3, minor):
        return sys.executable
    name = f"python3.{minor}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(name), *map(str, sorted(pyenv.glob(f"3.{minor}.*/bin/python")))]
    for candidate in filter(None, found):
        version = subprocess.run(
            [candidate, "-c", "import sys; print(sys.version_info[1])"], check=False, capture_output=True, text=True
        )
        if version.stdout.strip() == str(minor):
            return candidate
    return None


def lowest(requirements: Sequence[str]) -> list[str]:
    """Return the requirements of an extra with their lower bounds as exact versions."""
    return [re.sub(r">=\s*([\w.]+)[^;]*", r"==\1", requirement) for requirement in requirements]


def make_environment(name: str, adapter: Adapter, at: At) -> Path | None:
    """Return the interpreter of the environment of an adapter, made again if pyproject.toml has changed."""
    python = find_python(adapter.python)
    if python is None:
        return None
    folder = BUILD / f"{name}-{at}"
    ready = folder / "ready"
    project = ROOT / "pyproject.toml"
    interpreter = folder / "bin" / "python"
    pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    editable = ["--no-build-isolation", "--config-settings", "editable_mode=strict", "--editable"]
    if not ready.exists() or ready.stat().st_mtime < project.stat().st_mtime:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
        subprocess.run([*pip, "pip>=25.1", "setuptools>=77", "wheel"], check=True)
        extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
        wanted = extras[adapter.extra] if adapter.extra else []
        wanted = lowest(wanted) if at == "lowest" else wanted
        subprocess.run([*pip, "--group", f"{project}:adapters", *wanted, *adapter.packages], check=True)
        subprocess.run([*pip, *editable, f"{ROOT}[embedded,web,encryption]"], check=True)
        ready.touch()
    subprocess.run([*pip, "--no-deps", *editable, str(ROOT)], check=True)  # links the files that are new
    return interpreter


def fetch_source(interpreter: Path, package: str) -> Path:
    """Return the unpacked source distribution of the installed version of a package."""
    shown = subprocess.run([interpreter, "-m", "pip", "show", package], capture_output=True, text=True, check=True)
    version = next(line.split()[1] for line in shown.stdout.splitlines() if line.startswith("Version:"))
    folder = BUILD / "sources"
    stem = f"{package.replace('-', '_')}-{version}"
    if not (folder / stem).is_dir():
        command = [str(interpreter), "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--no-binary", ":all:", f"{package}=={version}", "--dest", str(folder)], check=True)
        with tarfile.open(folder / f"{stem}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return folder / stem


def run(name: str, adapter: Adapter, at: At) -> bool | None:
    """Run the tests of an adapter; return whether they passed, None if there is no interpreter for them."""
    start = monotonic()
    interpreter = make_environment(name, adapter, at)
    if interpreter is None:
        print(f"{name}: left out, there is no Python 3.{adapter.python}", flush=True)
        return None
    sources = {package: str(fetch_source(interpreter, package)) for package in adapter.sources}
    environment = {
        **os.environ,
        "PERDURE_ADAPTER_SOURCES": os.pathsep.join(f"{k}={v}" for k, v in sources.items()),
        "PERDURE_ADAPTER_PAGES": " ".join(adapter.pages),
    }
    passed = True
    if adapter.module:
        cache = ("--cache-dir", str(BUILD / f"{name}-{at}" / "mypy"))
        types = [str(interpreter), "-m", "mypy", *cache, "-p", adapter.module]
        passed = not subprocess.run(types, check=False, cwd=ROOT).returncode
    tests = [str(interpreter), "-m", "pytest", "-n", os.environ.get("PARALLEL", "2"), "--dist", "loadfile"]
    folder = f"tests/adapters/{name}"
    tests += [folder] if (ROOT / folder).is_dir() else []
    tests += ["tests/adapters/support"] if adapter.pages else []
    tests += ["--confcutdir=tests/adapters", "-o", "filterwarnings=default"]
    passed &= not subprocess.run(tests, check=False, cwd=ROOT, env=environment).returncode
    print(f"{name} at {at}: {'passed' if passed else 'failed'} in {monotonic() - start:.0f} s", flush=True)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.adapters", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"adapters: {', '.join(ADAPTERS)}; all by default")
    parser.add_argument("--at", choices=("newest", "lowest", "both"), default="newest", help="release of the framework")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - ADAPTERS.keys())
    if unknown:
        parser.error(f"no adapter is named {unknown[0]}; there are {', '.join(ADAPTERS)}")
    BUILD.mkdir(parents=True, exist_ok=True)
    releases: tuple[At, ...] = ("newest", "lowest") if options.at == "both" else (options.at,)
    results = {
        f"{name} at {at}": run(name, ADAPTERS[name], at) for name in options.names or ADAPTERS for at in releases
    }
    failed = [name for name, passed in results.items() if passed is False]
    print(
        f"{len(results) - len(failed)} of {len(results)} passed" + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
