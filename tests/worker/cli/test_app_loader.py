"""Loader of the APP argument: valid forms, and errors with the line of user code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from perdure import App, Worker
from perdure.queues.errors import ConfigurationError
from perdure.worker.cli.support.app_loader import load_app
from perdure.worker.cli.support.errors import Misuse

APP = "from perdure import App\napp = App('audit')\n"


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Change to a new working directory; remove its modules afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path.absolute()


def refusal(spec: str) -> str:
    with pytest.raises(Misuse) as refused:
        load_app(spec)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_module_of_the_working_directory() -> None:
    write("jobs.py", APP)
    assert load_app("jobs:app").name == "audit"


def test_a_module_in_a_package() -> None:
    write("pack/__init__.py", "")
    write("pack/jobs.py", APP)
    assert load_app("pack.jobs:app").name == "audit"


def test_a_file_and_the_modules_of_its_folder() -> None:
    write("deep/names.py", "NAME = 'from-a-neighbour'\n")
    write("deep/jobs.py", "from perdure import App\nfrom names import NAME\napp = App(NAME)\n")
    assert load_app("deep/jobs.py:app").name == "from-a-neighbour"


ARQ = "async def send(ctx, to): ...\nclass WorkerSettings:\n    max_jobs = 3\n"


def test_the_settings_of_a_worker_of_arq_are_an_app() -> None:
    write("mail.py", f"{ARQ}    functions = [send]\n")
    app = load_app("mail:WorkerSettings")
    assert (app.name, app.default_concurrency, list(app.tasks)) == ("arq.queue", 3, ["send"])


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("functions = []", "at least one function or cron_job must be registered: functions = [...]"),
        ("functions = [len]", "a function that is no 'async def' must be made by perdure.integrations.arq, got a "),
        ("functions = ['nowhere.send']", "No module named 'nowhere'"),
        ("functions = [send, send]", "task name must be unique, got 'send' twice"),
        ("cron_jobs = [send]", "a cron job must be made by perdure.integrations.arq, got a builtins.function"),
        ("functions = [send]; redis_settings = 'redis://x'", "redis_settings must be made by perdure.integrations.arq"),
        ("functions = [send]; job_serializer = len", "job_serializer must be omitted"),
    ],
)
def test_settings_of_a_worker_of_arq_that_are_refused(settings: str, problem: str) -> None:
    write("mail.py", f"{ARQ}    {settings}\n")
    assert problem in refusal("mail:WorkerSettings")


def test_a_file_is_the_module_that_other_modules_import() -> None:
    write("tasks_file.py", APP + "import neighbour\n")
    write("neighbour.py", "import tasks_file\n")
    app = load_app("tasks_file.py:app")
    assert sys.modules["neighbour"].tasks_file.app is app


@pytest.mark.parametrize("name", ["json.py", "typer.py", "my-jobs.py", "my.jobs.py"])
def test_a_file_name_may_be_no_valid_module_name(name: str) -> None:
    write(name, APP)
    taken = sys.modules.get(name.removesuffix(".py"))
    assert load_app(f"{name}:app").name == "audit"
    assert sys.modules.get(name.removesuffix(".py")) is taken


@pytest.mark.parametrize("spec", ["jobs", "jobs.py", ":app", "jobs:", ""])
def test_an_invalid_app_argument_is_refused_with_the_valid_forms(spec: str) -> None:
    assert "module:attribute or path/to/file.py:attribute" in refusal(spec)


def test_a_missing_file_is_refused() -> None:
    assert "could not find the Python file jobs.py" in refusal("jobs.py:app")


def test_a_folder_is_refused() -> None:
    assert "could not find the Python file ./" in refusal("./:app")


def test_a_missing_module_is_refused() -> None:
    said = refusal("jobs:app")
    assert "no module 'jobs'" in said
    assert str(Path.cwd()) in said


def test_a_missing_module_of_a_package_is_refused() -> None:
    write("pack/__init__.py", "")
    assert "no module 'pack.jobs'" in refusal("pack.jobs:app")


@pytest.mark.parametrize("spec", ["jobs:app", "jobs.py:app"])
@pytest.mark.parametrize(
    ("text", "said", "line"),
    [
        ("def f():\n    raise ValueError('boom')\nf()\n", "ValueError: boom", 2),
        ("import nothing_of_this_name\n", "ModuleNotFoundError: No module named 'nothing_of_this_name'", 1),
        ("\n\ndef f(:\n", "SyntaxError: invalid syntax", 3),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3", 2),
        ("import json\njson.loads('{')\n", "JSONDecodeError: Expecting property name", 2),
        (APP + "@app.task\ndef f(): ...\n", "task 'f': the first parameter must be the Context", 3),
    ],
    ids=["raises", "imports", "syntax", "exits", "in the library", "in perdure"],
)
def test_a_failed_import_is_reported_with_the_line_of_user_code(spec: str, text: str, said: str, line: int) -> None:
    path = write("jobs.py", text)
    reported = refusal(spec)
    assert said in reported
    assert reported.endswith(f"({path}:{line})")


def test_a_failed_import_of_a_helper_module_is_reported_with_its_line() -> None:
    write("jobs.py", "import helper_of_jobs\n")
    path = write("helper_of_jobs.py", "x = 1\nx.nothing\n")
    assert refusal("jobs:app").endswith(f"({path}:2)")


def test_a_missing_attribute_is_refused_with_the_apps_of_the_module() -> None:
    write("jobs.py", "from perdure import App\nfirst = App('a')\nsecond = App('b')\nthird = 3\n")
    assert refusal("jobs:app") == "jobs: has no 'app'; Apps in it: jobs:first, jobs:second"


def test_an_attribute_that_is_not_an_app_is_refused() -> None:
    write("jobs.py", "from perdure import App\nfirst = App('a')\nthird = 3\n")
    assert refusal("jobs.py:third") == "jobs.py: 'third' is an int, not an App; Apps in it: jobs.py:first"


def test_a_module_without_an_app_is_refused() -> None:
    write("jobs.py", "x = 1\n")
    assert refusal("jobs:app") == "jobs: has no 'app'; define one: app = App('name')"


SHOP = "from perdure import App\napp = App('shop', include=['pack.mail', 'pack.orders'])\n"
TASK = "from pack.app import app\n@app.task\nasync def {}(ctx): ...\n"


def write_package(**modules: str) -> None:
    for name, text in {"__init__": "", "app": SHOP, **modules}.items():
        write(f"pack/{name}.py", text)


def test_the_modules_that_an_app_includes_are_imported_though_they_import_the_app() -> None:
    write_package(mail=TASK.format("send"), orders="import pack.mail\n" + TASK.format("order"))
    assert sorted(load_app("pack.app:app").tasks) == ["order", "send"]


def test_an_included_module_that_fails_is_named_with_its_line() -> None:
    write_package(mail=TASK.format("send") + "1 / 0\n", orders="")
    said = (
        f"app 'shop' could not import 'pack.mail', which it includes: ZeroDivisionError: division by zero ({Path.cwd()}"
    )
    assert refusal("pack.app:app") == f"{said}/pack/mail.py:4)"


def test_a_missing_included_module_is_named_with_the_remedy() -> None:
    write_package(mail="")
    said = f"'pack.orders', which it includes: 'pack' ({Path.cwd()}/pack) has no module 'orders'; correct the name"
    assert said in refusal("pack.app:app")
    write("lone.py", "from perdure import App\napp = App('lone', include=['nowhere.mail'])\n")
    assert "no module 'nowhere' is on the import path; install it, or start in" in refusal("lone:app")


def test_a_circular_import_is_refused_with_the_remedy() -> None:
    write("pack/__init__.py", "")
    write("pack/app.py", "import pack.mail\n" + APP)
    write("pack/mail.py", TASK.format("send"))
    assert refusal("pack.app:app").endswith("in that of the app: name them, App(..., include=[...])")


def test_an_error_of_perdure_in_a_module_is_its_sentence() -> None:
    write("jobs.py", "from perdure import App\napp = App('shop', include='pack.mail')\n")
    assert refusal("jobs:app").startswith(
        "could not import jobs: include of app 'shop' must be a list of names of modules"
    )


def test_a_module_that_an_included_one_lacks_is_not_taken_for_it() -> None:
    write_package(mail="import nothing_of_this_name\n")
    assert "'pack.mail', which it includes: ModuleNotFoundError: No module named 'nothing" in refusal("pack.app:app")


def test_an_app_whose_modules_import_it_under_another_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tasks would be those of another app object, and the worker would know none of them."""
    monkeypatch.syspath_prepend(Path.cwd())
    write_package(mail=TASK.format("send"), orders="")
    assert "app 'shop' exists twice, since its module was imported under two names" in refusal("pack/app.py:app")
    assert App("shop").include == ()  # it may exist again afterwards


@pytest.mark.parametrize("include", ["pack.mail", [".mail"], [""], ["pack/mail.py"], [1], 3])
def test_what_is_no_list_of_modules_is_refused(include: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"include of app 'shop' must "):
        App("shop", include=include)


async def test_a_worker_of_a_program_imports_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path.cwd())
    write_package(mail=TASK.format("send"), orders=TASK.format("order").replace("task", "task(queue='orders')"))
    app = importlib.import_module("pack.app").app
    assert not app.tasks
    assert Worker(app).queues == ("orders", "shop")
