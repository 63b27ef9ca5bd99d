"""What belongs to a release: the bill of materials, and the audit of what users install."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.paths import ROOT


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"ci_{name}", ROOT / ".ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(name: str, **changed: Any) -> dict[str, Any]:
    return {"name": name, "version": "1.0", "vulns": [], **changed}


HOLE = {"id": "CVE-1", "fix_versions": ["1.1"]}
SKIPPED = {"name": "redis", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("answers", "code", "text"),
    [
        ([answer("redis"), answer("anyio")], 0, "2 of 2 packages audited, 0 known vulnerabilities\n"),
        ([answer("redis", vulns=[HOLE])], 1, "redis 1.0: CVE-1, fixed in 1.1\n1 of 1 packages audited, 1 known"),
        ([answer("no-requirement-of-perdure", vulns=[HOLE])], 0, "0 of 0 packages audited, 0 known vulnerabilities\n"),
        ([SKIPPED, answer("anyio")], 3, "1 of 2 packages audited, 0 known vulnerabilities\n"),
        ([SKIPPED, answer("anyio", vulns=[HOLE])], 1, "anyio 1.0: CVE-1, fixed in 1.1\n1 of 2 packages"),
        (None, 3, "the advisory database did not answer\n"),
    ],
)
def test_the_audit_fails_for_a_package_of_users_only(
    answers: list[dict[str, Any]] | None,
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    audit = script("audit")
    output = "" if answers is None else json.dumps({"dependencies": answers})
    monkeypatch.setattr(audit, "subprocess", SimpleNamespace(run=lambda *_, **__: SimpleNamespace(stdout=output)))
    assert audit.main() == code
    assert capsys.readouterr().out.startswith(text)


def test_what_is_audited_has_the_requirements_of_requirements() -> None:
    names = script("audit").installed_requirements("perdure")
    assert {"redis", "pydantic-core", "starlette"} <= names
    assert not {"pytest", "perdure", "mypy"} & names


def test_the_bill_of_materials_names_what_is_installed_with_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without installing: the program that lists an environment has written this list."""
    sbom = script("sbom")
    ran: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> None:
        ran.append(command)
        if "-o" in command:
            Path(command[command.index("-o") + 1]).write_text('{"components": [{"name": "redis"}]}')

    monkeypatch.setattr(sbom, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(sbom, "venv", SimpleNamespace(create=lambda *_, **__: None))
    output = tmp_path / "perdure.cdx.json"
    sbom.main(["perdure-1.0-py3-none-any.whl", str(output)])
    assert capsys.readouterr().out == f"{output}: 1 components\n"
    assert ran[0][-1] == f"perdure-1.0-py3-none-any.whl[{','.join(sbom.EXTRAS)}]"
    assert "--validate" in ran[-1]
    assert Path(sys.executable).with_name("cyclonedx-py").name == Path(ran[-1][0]).name
