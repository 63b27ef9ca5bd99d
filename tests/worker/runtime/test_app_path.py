"""Import path of an app: under which path another process can import it, and when it must not."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from perdure import App
from perdure.worker.errors import ConfigurationError
from perdure.worker.runtime.children.app_path import app_command, app_digest, app_path, use_import_path

from tests.support.workers import BOUND

REPORT = """
import sys
from perdure.worker.errors import ConfigurationError
from perdure.worker.runtime.children.app_path import app_path

def report(app):
    try:
        print(app_path(app))
    except ConfigurationError as error:
        print("none:", error)
"""
DEFINED = "from perdure import App\nfrom report import report\napp = App('audit')\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to a folder on the import path; remove its modules afterwards."""
    (tmp_path / "report.py").write_text(REPORT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def run(*arguments: str, **files: str) -> str:
    """Write files, run Python with arguments, and return what it printed. pack: `__init__.py` of a package."""
    for name, text in files.items():
        path = Path("pack/__init__.py" if name == "pack" else f"{name}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
        env={"PYTHONPATH": "."},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_app_of_an_imported_file_is_loaded_from_that_file(folder: Path) -> None:
    (folder / "jobs.py").write_text(DEFINED)
    assert app_path(importlib.import_module("jobs").app) == f"{folder}/jobs.py:app"


def test_an_app_of_a_package_is_loaded_by_the_name_of_its_module(folder: Path) -> None:
    (folder / "pack").mkdir()
    (folder / "pack" / "__init__.py").write_text(DEFINED.replace("app =", "main_app ="))
    (folder / "pack" / "jobs.py").write_text(DEFINED)
    assert app_path(importlib.import_module("pack.jobs").app) == "pack.jobs:app"
    assert app_path(importlib.import_module("pack").main_app) == "pack:main_app"


def test_an_app_of_a_function_has_no_path() -> None:
    with pytest.raises(ConfigurationError, match="not an attribute of a module"):
        app_path(App("audit"))


@pytest.mark.parametrize("test", ['__name__ == "__main__"', "'__main__' == __name__"])
def test_a_script_that_runs_its_worker_under_a_guard_is_loaded_from_its_file(folder: Path, test: str) -> None:
    script = f"{DEFINED}def main():\n    report(app)\n\nif {test}:\n    x = 1\n    main(\n    )\n"
    assert run("script.py", script=script) == f"{folder}/script.py:app"


def test_a_script_in_a_thread_is_judged_by_its_main_thread(folder: Path) -> None:
    thread = "import threading\nthread = threading.Thread(target=report, args=(app,))\n"
    guarded = f"{DEFINED}{thread}if __name__ == '__main__':\n    thread.start()\n    thread.join()\n"
    assert run("guarded.py", guarded=guarded) == f"{folder}/guarded.py:app"
    assert run("script.py", script=f"{DEFINED}{thread}thread.start()\nthread.join()\n").startswith("none: ")


def test_a_module_that_is_run_by_name_is_loaded_by_its_name(folder: Path) -> None:
    guarded = f"{DEFINED}if __name__ == '__main__':\n    report(app)\n"
    (folder / "deep").mkdir()
    (folder / "deep" / "script.py").write_text(guarded)
    assert run("-m", "deep.script") == "deep.script:app"


@pytest.mark.parametrize(
    "end",
    [
        "report(app)\n",
        "if __name__ == '__main__':\n    pass\nreport(app)\n",
        "if __name__ == '__main__':\n    pass\nelse:\n    pass\nif True:\n    report(app)\n",
        "if __name__ != '__main__':\n    pass\nelse:\n    report(app)\n",
    ],
)
def test_a_script_without_a_guard_around_its_worker_has_no_path(end: str) -> None:
    """Its import would start the worker again."""
    assert run("script.py", script=DEFINED + end).startswith("none: the worker does not run under")


def test_a_module_that_runs_the_worker_while_it_is_imported_has_no_path(folder: Path) -> None:
    said = "none: the worker runs while the module {} is imported"
    assert run("-c", "import jobs", jobs=f"{DEFINED}report(app)\n") == said.format("jobs")
    (folder / "pack").mkdir()
    (folder / "pack" / "inner.py").write_text(DEFINED)
    package = "from report import report\nimport pack.inner\nreport(pack.inner.app)\n"
    assert run("-c", "import pack", pack=package) == said.format("pack")


def test_a_program_that_is_no_file_has_no_path() -> None:
    assert run("-c", f"{DEFINED}report(app)") == "none: the program that defines it is not a file"


def test_an_app_that_the_script_imports_needs_no_guard(folder: Path) -> None:
    script = "from jobs import app\nfrom report import report\nreport(app)\n"
    assert run("script.py", script=script, jobs=DEFINED) == f"{folder}/jobs.py:app"


def test_a_child_imports_from_where_its_parent_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "jobs.py").write_text(DEFINED)
    command = app_command(importlib.import_module("jobs").app, ["a", "b"], "mine")
    assert command.arguments[-6:] == ["--queues", "a,b", "--name", "mine", "--", f"{folder}/jobs.py:app"]
    here = [str(Path(entry).absolute()) for entry in sys.path]
    monkeypatch.setattr(sys, "path", ["/elsewhere", str(folder)])
    environment = dict(command.environment)
    use_import_path(environment)
    assert sys.path == [*here, "/elsewhere"]
    assert environment == {}  # processes that the child starts do not get it


def test_the_digest_tells_apps_with_other_tasks_or_settings_apart() -> None:
    def made(*tasks: str, **settings: object) -> str:
        app = App("audit")
        for name in tasks:

            @app.task(name=name)
            async def handler(ctx: object) -> None: ...

        app.configure(**settings)
        return app_digest(app)

    assert made("a", "b") == made("b", "a")
    found = [made("a"), made("a", "b"), made("a", namespace="other"), made("a", lease=20.0)]
    found += [made("a", webhook_secret="one"), made("a", webhook_secret="two")]
    assert len(set(found)) == len(found)
