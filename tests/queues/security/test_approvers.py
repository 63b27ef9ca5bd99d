"""Keys of approvers: their text forms, what is signed, and who may answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from perdure.queues import ConfigurationError
from perdure.queues.security.approvers import (
    ApproverKey,
    Statement,
    make_answer_keys,
    read_approver_keys,
    read_approvers,
)

ADA, EVE = ApproverKey("ada", bytes(range(32))), ApproverKey("eve", bytes(range(1, 33)))
SAID = Statement("ns", "queue", "task", "approval#2", "ab" * 32, {"b": 1, "a": [True, 1.5, "x"]}, "ada")


def test_the_bytes_that_are_signed_have_one_form() -> None:
    assert SAID.encode() == (
        b'perdure answer 1\n["ns","queue","task","approval#2","%b",{"a":[true,1.5,"x"],"b":1},"ada"]' % (b"ab" * 32)
    )
    assert SAID._replace(namespace="n", queue="squeue").encode() != SAID.encode()


def test_a_signature_is_that_of_the_standard() -> None:
    """First test vector of RFC 8032, 7.1."""
    key = ApproverKey("ada", bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"))
    assert key.public_line == "ada ed25519:11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo="


@pytest.mark.parametrize(("name", "value"), [*zip(Statement._fields[:5], "abcde", strict=True), ("value", {"a": []})])
def test_a_signature_is_for_one_statement(name: str, value: Any) -> None:
    known, signature = read_approvers([ADA.public_line, EVE.public_line], "keys"), ADA.sign(SAID)
    assert known.problem(SAID, signature, "ada") is None
    changed = known.problem(SAID._replace(**{name: value}), signature, "ada")
    assert changed == "its signature is not one of approver 'ada' for this answer to this question"


def test_an_approver_may_have_several_keys() -> None:
    new = ApproverKey("ada", bytes(32))
    known = read_approvers(["# old and new", ADA.public_line, "", f"  {new.public_line}"], "keys")
    assert [known.problem(SAID, key.sign(SAID), "") for key in (ADA, new)] == [None, None]
    assert known.problem(SAID, ApproverKey("ada", bytes(31) + b"x").sign(SAID), "") is not None


def test_who_may_answer() -> None:
    known = read_approvers([ADA.public_line, EVE.public_line, "finance = eve"], "keys")
    allowed = {who: sorted(known.who_may_answer(who)) for who in ("ada", "finance", "", "Ada")}
    assert allowed == {"ada": ["ada"], "finance": ["eve"], "": ["ada", "eve"], "Ada": ["ada", "eve"]}


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([], "keys has no approver"),
        (["ada"], "line 1 must be a name and ed25519:BASE64"),
        (["ada ed25519:AAAA"], "line 1 must be a name and ed25519:BASE64 of 32 bytes"),
        ([ADA.public_line + " x"], "line 1 must be a name"),
        ([ADA.private_line], "line 1: it is the private key of 'ada', which workers must not have"),
        ([ADA.public_line, "ada = ada"], "'ada' must be an approver or a group, and is both"),
        ([ADA.public_line, "desk = ada bob"], "group 'desk' has members without a key: bob"),
        ([ADA.public_line, "desk ="], "line 2: group 'desk' must be there once and have members"),
        (["=x ed25519:AAAA"], "line 1: name of an approver must be"),
    ],
)
def test_lines_of_approvers_are_refused_with_the_place(lines: list[str], problem: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        read_approvers(lines, "keys")
    assert problem in str(error.value)
    assert ADA.private_line.split(":")[1] not in str(error.value)


def test_private_keys_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# of the server\n{ADA.private_line}\n{EVE.private_line}\n")
    path.chmod(0o600)
    assert read_approver_keys(path) == {"ada": ADA, "eve": EVE}
    assert "seed" not in repr(ADA)
    with pytest.raises(ConfigurationError, match="must hold one key, got 2: ada, eve"):
        ApproverKey.read(path)
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="must not be readable or writable by all users"):
        read_approver_keys(path)
    path.chmod(0o600)
    path.write_text(ADA.private_line + "\n" + ADA.private_line)
    with pytest.raises(ConfigurationError, match="line 2: 'ada' must have one key in this file"):
        read_approver_keys(path)
    path.write_text("")
    with pytest.raises(ConfigurationError, match="holds no key"):
        read_approver_keys(path)


def test_keys_that_settings_name(tmp_path: Path) -> None:
    file, own = tmp_path / "approvers", tmp_path / "ada.key"
    file.write_text(ADA.public_line)
    own.write_text(ADA.private_line)
    own.chmod(0o600)
    assert make_answer_keys("", None, None) is None
    found = make_answer_keys(f"{ADA.public_line}; desk = ada", None, own)
    assert found is not None
    assert found.own == ADA
    assert found.approvers is not None
    assert found.approvers.groups == {"desk": frozenset(["ada"])}
    with pytest.raises(ConfigurationError, match="must not both be set"):
        make_answer_keys(ADA.public_line, file, None)
    file.chmod(0o666)
    with pytest.raises(ConfigurationError, match="must not be writable by all users"):
        make_answer_keys("", file, None)
    with pytest.raises(ConfigurationError, match="could not read approver key file"):
        make_answer_keys("", None, tmp_path / "missing")


@pytest.mark.parametrize("name", ["", "a b", "a=b", "a;b", "#a", "a" * 129, "a\nb"])
def test_names_that_cannot_be_used(name: str) -> None:
    with pytest.raises(ConfigurationError, match="name of an approver must be"):
        ApproverKey.generate(name)
