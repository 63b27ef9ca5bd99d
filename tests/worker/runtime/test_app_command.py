"""Command of a quarantine process: from where it imports the app, and whether it found the same one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from perdure import App
from perdure.worker.errors import ConfigurationError
from perdure.worker.runtime.children.app_command import app_command, app_digest, use_import_path


def test_a_child_imports_from_where_its_parent_does(monkeypatch: pytest.MonkeyPatch) -> None:
    command = app_command("jobs:app", ["a", "b"], "mine")
    assert command.arguments[-6:] == ["--queues", "a,b", "--name", "mine", "--", "jobs:app"]
    here = [str(Path(entry).absolute()) for entry in sys.path]
    monkeypatch.setattr(sys, "path", ["/elsewhere", here[0]])
    environment = dict(command.environment)
    use_import_path(environment)
    assert sys.path == [*here, "/elsewhere"]
    assert environment == {}  # processes that the child starts do not get it


@pytest.mark.parametrize("path", ["", "jobs", "jobs:", ":app"])
def test_a_path_without_module_or_attribute_is_refused(path: str) -> None:
    with pytest.raises(ConfigurationError, match=f"import_path must be 'module:attribute'.*got {path!r}"):
        app_command(path, ["a"], None)


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
