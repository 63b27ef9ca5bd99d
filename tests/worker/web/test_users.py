"""Roles, and the file of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from perdure.queues import ConfigurationError
from perdure.worker.web.users import Role, TokenFile, User, add_token, load_secret, token_hash


@pytest.mark.parametrize(
    ("role", "includes"),
    [
        (Role.PRODUCER, {Role.PRODUCER}),
        (Role.VIEWER, {Role.VIEWER}),
        (Role.OPERATOR, {Role.OPERATOR, Role.VIEWER, Role.PRODUCER}),
        (Role.APPROVER, {Role.APPROVER, Role.VIEWER}),
        (Role.ADMIN, set(Role)),
    ],
)
def test_a_role_includes_others(role: Role, includes: set[Role]) -> None:
    user = User("ada", [role])
    assert {other for other in Role if user.may(other)} == includes


def test_a_token_finds_its_user_and_the_file_has_its_hash_only(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    token = add_token(path, "shop", [Role.PRODUCER])
    other = add_token(path, "ada", [Role.VIEWER, Role.APPROVER])
    tokens = TokenFile(path)
    assert tokens.find(token) == User("shop", [Role.PRODUCER])
    assert tokens.find(other) == User("ada", [Role.APPROVER, Role.VIEWER])
    assert tokens.find(token + "x") is None
    assert tokens.find(token_hash(token)) is None, "who reads the file has no token"
    assert token not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_token_may_be_of_a_tenant(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    token = add_token(path, "shop", [Role.PRODUCER], "acme")
    other = add_token(path, "ada", [Role.PRODUCER])
    tokens = TokenFile(path)
    assert tokens.find(token) == User("shop", [Role.PRODUCER], "acme") != User("shop", [Role.PRODUCER])
    user = tokens.find(other)
    assert user is not None and user.tenant is None
    for wrong in ("a b", "~", ""):
        with pytest.raises(ConfigurationError, match="tenant must be 1 to 64 letters"):
            add_token(path, "eve", [Role.PRODUCER], wrong)


def test_a_change_of_the_file_is_in_force_at_once(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    token = add_token(path, "shop", [Role.PRODUCER])
    tokens = TokenFile(path)
    path.write_text(path.read_text().replace("producer", "viewer"))
    assert tokens.find(token) == User("shop", [Role.VIEWER])
    path.write_text("")
    assert tokens.find(token) is None


def test_a_broken_file_leaves_the_users_of_the_last_one(tmp_path: Path, log: list[str]) -> None:
    path = tmp_path / "tokens.toml"
    token = add_token(path, "shop", [Role.PRODUCER])
    tokens = TokenFile(path)
    path.write_text("[[token]\n")
    assert tokens.find(token) == tokens.find(token) == User("shop", [Role.PRODUCER])
    assert [line.partition(":")[0] for line in log] == [f"token file {path} must be TOML"], "one line for one problem"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("token = 1", "must have tables [[token]]"),
        ('[[token]]\nname = "a"', "token 1 of {path} must have name, roles, sha256, perhaps tenant, and nothing else"),
        (
            '[[token]]\nname = "a"\nroles = ["king"]\nsha256 = "' + "0" * 64 + '"',
            "roles of token 1 of {path} must be a list of producer, viewer, operator, approver, admin, got ['king']",
        ),
        ('[[token]]\nname = "a"\nroles = ["viewer"]\nsha256 = "secret"', "must have 64 hexadecimal digits"),
        ('[[token]]\nname = "a\\n"\nroles = ["viewer"]\nsha256 = "' + "0" * 64 + '"', "name of a user"),
        (
            ('[[token]]\nname = "a"\nroles = ["viewer"]\nsha256 = "' + "0" * 64 + '"\n') * 2,
            "must have a name and a hash",
        ),
        ("\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "must be TOML"),
    ],
)
def test_an_entry_that_is_not_valid_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigurationError) as raised:
        TokenFile(path)
    assert problem.format(path=path) in str(raised.value)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="make one: perdure web token NAME"):
        TokenFile(tmp_path / "tokens.toml")


def test_a_name_is_given_once(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    add_token(path, "shop", [Role.PRODUCER])
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match="name 'shop' must be free"):
        add_token(path, "shop", [Role.ADMIN])
    assert path.read_bytes() == before


def test_a_secret_is_made_once_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret = load_secret(path)
    assert len(secret) >= 32
    assert load_secret(path) == secret
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_short_secret_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("letmein")
    with pytest.raises(ConfigurationError, match="at least 32 random bytes"):
        load_secret(path)


def test_the_secret_may_be_mounted_as_kubernetes_does(tmp_path: Path) -> None:
    """The name is a link through a folder that is replaced as a whole."""
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026" / "secret").write_text("s" * 48)
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "secret").symlink_to("..data/secret")
    assert load_secret(tmp_path / "secret") == b"s" * 48
