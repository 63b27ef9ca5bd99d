"""Encryption of data: round trip, associated data, keys as text and in files."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from perdure.queues import (
    ConfigurationError,
    ConnectionSettings,
    DecryptionError,
    Encryptor,
    KeyMissing,
    NotEncrypted,
    Partition,
    TamperedData,
    generate_key,
    make_encryptor,
    read_settings,
)
from perdure.queues.security.encryption import NO_KEYS, VERSION, arguments_field, is_encrypted

FIRST, SECOND = b"1" * 32, b"2" * 32
HERE = Partition("ns", "default", 0)
ENCRYPTOR = Encryptor([FIRST])  # imports cryptography, so that no example of a property does

kinds = st.sampled_from(["result", "error", "args:audit", "d:read", "d:read#2", "s:read", "i:read"]) | st.text().map(
    "d:{}".format
)


@given(st.binary(max_size=300), kinds)
def test_encrypted_data_is_unreadable_and_decrypts_to_the_same(data: bytes, kind: str) -> None:
    cipher = ENCRYPTOR.of(HERE, "x")
    stored = cipher.encrypt(kind, data)
    assert is_encrypted(stored)
    assert not is_encrypted(data) or data[:1] == b"\xc1"
    assert len(data) < 8 or data not in stored
    assert ENCRYPTOR.of(HERE, "x").decrypt(kind, stored) == data


def test_equal_data_is_encrypted_to_different_bytes() -> None:
    cipher = ENCRYPTOR.of(HERE, "x")
    assert len({cipher.encrypt("result", b"[1]") for _ in range(1000)}) == 1000


@given(st.binary(max_size=60), st.data())
def test_a_change_of_any_byte_is_detected(data: bytes, draw: st.DataObject) -> None:
    cipher = ENCRYPTOR.of(HERE, "x")
    stored = bytearray(cipher.encrypt("result", data))
    position = draw.draw(st.integers(1, len(stored) - 1))
    stored[position] ^= draw.draw(st.integers(1, 255))
    with pytest.raises(DecryptionError, match="could not decrypt the result of task x"):
        cipher.decrypt("result", bytes(stored))


@pytest.mark.parametrize(
    ("there", "task_id", "kind"),
    [
        (HERE, "y", "result"),
        (HERE, "x", "error"),
        (HERE, "x", "d:result"),
        (Partition("ns", "other", 0), "x", "result"),
        (Partition("another", "default", 0), "x", "result"),
    ],
    ids=["task", "kind", "step", "queue", "namespace"],
)
def test_data_moved_to_another_place_is_refused(there: Partition, task_id: str, kind: str) -> None:
    encryptor = ENCRYPTOR
    stored = encryptor.of(HERE, "x").encrypt("result", b"[1]")
    with pytest.raises(TamperedData, match="changed in Redis, or moved there from another task, step or field"):
        encryptor.of(there, task_id).decrypt(kind, stored)


def test_arguments_are_bound_to_the_name_of_their_task() -> None:
    cipher = ENCRYPTOR.of(HERE, "x")
    with pytest.raises(TamperedData):
        cipher.decrypt(arguments_field("delete", ()), cipher.encrypt(arguments_field("look", ()), b"{}"))


def test_data_may_move_between_the_partitions_of_a_queue() -> None:
    stored = ENCRYPTOR.of(HERE, "x").encrypt("result", b"1")
    assert ENCRYPTOR.of(Partition("ns", "default", 7), "x").decrypt("result", stored) == b"1"


def test_a_missing_key_is_named_by_its_id_and_not_disclosed() -> None:
    stored = ENCRYPTOR.of(HERE, "x").encrypt("d:read", b"[1]")
    with pytest.raises(KeyMissing, match="could not decrypt a step 'read' of task x") as caught:
        Encryptor([SECOND]).of(HERE, "x").decrypt("d:read", stored)
    assert Encryptor([FIRST]).key_ids[0] in str(caught.value)
    assert "PERDURE_ENCRYPTION_KEYS" in str(caught.value)
    for secret in (FIRST, SECOND, base64.b64encode(FIRST), base64.b64encode(SECOND)):
        assert secret.decode() not in str(caught.value)
    with pytest.raises(KeyMissing, match="the keys of this process are: none"):
        NO_KEYS.of(HERE, "x").decrypt("d:read", stored)


def test_the_first_key_encrypts_and_all_decrypt() -> None:
    old, both, new = Encryptor([FIRST]), Encryptor([SECOND, FIRST]), Encryptor([SECOND])
    stored_before = old.of(HERE, "x").encrypt("result", b"1")
    stored_since = both.of(HERE, "x").encrypt("result", b"2")
    assert both.of(HERE, "x").decrypt("result", stored_before) == b"1"
    assert new.of(HERE, "x").decrypt("result", stored_since) == b"2"
    with pytest.raises(KeyMissing):
        new.of(HERE, "x").decrypt("result", stored_before)


def test_data_of_a_later_format_is_reported_as_such() -> None:
    stored = ENCRYPTOR.of(HERE, "x").encrypt("result", b"1")
    with pytest.raises(KeyMissing, match="in format 3, which only a later version can read"):
        ENCRYPTOR.of(HERE, "x").decrypt("result", stored[:1] + b"\x03" + stored[2:])


@pytest.mark.parametrize("version", [0, 16, 255])
def test_data_of_an_impossible_version_counts_as_tampered(version: int) -> None:
    for encryptor in (NO_KEYS, Encryptor([FIRST])):
        with pytest.raises(TamperedData):
            encryptor.of(HERE, "x").decrypt("result", b"\xc1" + bytes([version]) * 60)


def test_plain_data_is_read_unless_encryption_is_required() -> None:
    assert ENCRYPTOR.of(HERE, "x").decrypt("result", b"[1]") == b"[1]"
    strict = Encryptor([FIRST], required=True).of(HERE, "x")
    with pytest.raises(NotEncrypted, match="PERDURE_ENCRYPTION_REQUIRED is set"):
        strict.decrypt("result", b"[1]")
    with pytest.raises(ConfigurationError, match="there is no key"):
        Encryptor(required=True)


# keys


@given(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=4, unique=True), st.sampled_from([",", "\n"]))
def test_keys_are_parsed_in_both_base64_alphabets(keys: list[bytes], between: str) -> None:
    text = between.join(base64.b64encode(key).decode() for key in keys)
    assert make_encryptor(text, None).key_ids == Encryptor(keys).key_ids
    url_safe = between.join(base64.urlsafe_b64encode(key).decode() for key in keys)
    assert make_encryptor(url_safe, None).key_ids == Encryptor(keys).key_ids


@pytest.mark.parametrize("wrong", ["short", "c2hvcnQ=", base64.b64encode(b"x" * 31).decode(), "not base64 at all!"])
def test_a_bad_key_is_reported_by_its_position(wrong: str) -> None:
    with pytest.raises(ConfigurationError, match="PERDURE_ENCRYPTION_KEYS: key 2 must be 32 bytes in base64") as caught:
        make_encryptor(f"{generate_key()},{wrong}", None)
    assert wrong not in str(caught.value)


def test_a_key_file_has_a_key_per_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    new, old = generate_key(), generate_key()
    file.write_text(f"# since November\n{new}\n\n{old}\n")
    file.chmod(0o600)
    assert make_encryptor("", file).key_ids == make_encryptor(f"{new} {old}", None).key_ids
    file.chmod(0o640)
    assert make_encryptor("", file).active
    for mode in (0o644, 0o602):
        file.chmod(mode)
        with pytest.raises(
            ConfigurationError, match=rf"readable or writable by all users \(mode 0{mode:o}\): chmod 600"
        ):
            make_encryptor("", file)
    file.chmod(0o600)
    file.write_text("# none yet\n")
    with pytest.raises(ConfigurationError, match="holds no key; generate one"):
        make_encryptor("", file)
    with pytest.raises(ConfigurationError, match=r"could not read key file .*: No such file"):
        make_encryptor("", tmp_path / "missing")
    with pytest.raises(ConfigurationError, match="not both be set: leave one of them out"):
        make_encryptor(new, file)


@pytest.mark.parametrize(("text", "required"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_required_is_yes_or_no(monkeypatch: pytest.MonkeyPatch, text: str, required: bool) -> None:
    monkeypatch.setenv("PERDURE_ENCRYPTION_KEYS", generate_key())
    monkeypatch.setenv("PERDURE_ENCRYPTION_REQUIRED", text)
    assert read_settings(ConnectionSettings, {}).encryptor.required is required
    monkeypatch.setenv("PERDURE_ENCRYPTION_REQUIRED", "perhaps")
    with pytest.raises(ConfigurationError, match=r"PERDURE_ENCRYPTION_REQUIRED: .* \(got 'perhaps'\)"):
        read_settings(ConnectionSettings, {})


def test_without_keys_cryptography_is_not_imported() -> None:
    program = (
        "import sys, perdure; from perdure.queues import Producer; Producer('redis://localhost');"
        "from perdure import App; App('a').encryptor; import perdure.worker.runtime.worker;"
        "assert 'perdure.queues.security.aesgcm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    monkeypatch.delitem(sys.modules, "perdure.queues.security.aesgcm", raising=False)
    with pytest.raises(ConfigurationError, match=r"pip install 'perdure\[encryption\]'"):
        Encryptor([b"only here" + bytes(23)])


@pytest.mark.timeout(30)
def test_a_key_file_is_a_regular_file_of_bounded_size(tmp_path: Path) -> None:
    pipe, large, link = tmp_path / "pipe", tmp_path / "large", tmp_path / "link"
    os.mkfifo(pipe, 0o600)
    large.write_bytes(b"#" * 70_000)
    large.chmod(0o600)
    for file, problem in (
        (pipe, "it must be a regular file, and is a pipe"),
        (Path("/dev/zero"), "it must be a regular file, and is a device"),
        (large, "it has more than 65,536 bytes"),
    ):
        with pytest.raises(ConfigurationError, match=f"could not read key file .*: {problem}"):
            make_encryptor("", file)
    kept = tmp_path / "keys"
    kept.write_text(generate_key())
    kept.chmod(0o600)
    link.symlink_to(kept)  # as secrets are mounted into containers
    assert make_encryptor("", link).active


def test_signed_data_is_readable_and_bound_to_its_place() -> None:
    signing, sealing = Encryptor([FIRST], required=True, sign_only=True), Encryptor([FIRST])
    partition = Partition("n", "q", 0)
    signed = signing.of(partition, "t").encrypt("result", b'{"paid":7}')
    assert b'{"paid":7}' in signed
    assert is_encrypted(signed)
    assert signing.of(partition, "t").decrypt("result", signed) == b'{"paid":7}'
    assert sealing.of(partition, "t").decrypt("result", signed) == b'{"paid":7}'
    for task, kind, data in (
        ("t", "error", signed),
        ("other", "result", signed),
        ("t", "result", signed.replace(b"7", b"8")),
        ("t", "result", signed[:1] + VERSION + signed[2:]),
    ):
        with pytest.raises(TamperedData):
            signing.of(partition, task).decrypt(kind, data)
    with pytest.raises(NotEncrypted):
        signing.of(partition, "t").decrypt("result", b'{"paid":7}')
    with pytest.raises(KeyMissing, match="signed with key"):
        Encryptor([bytes(range(1, 33))]).of(partition, "t").decrypt("result", signed)


def test_signing_needs_a_key_and_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    monkeypatch.delitem(sys.modules, "perdure.queues.security.aesgcm", raising=False)
    cipher = Encryptor([FIRST], sign_only=True).of(Partition("n", "q", 0), "t")
    assert cipher.decrypt("result", cipher.encrypt("result", b"1")) == b"1"
    with pytest.raises(ConfigurationError, match="PERDURE_SIGN_ONLY needs a key"):
        Encryptor(sign_only=True)
