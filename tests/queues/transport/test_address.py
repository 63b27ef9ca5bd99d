"""Addresses: valid and invalid URLs, and passwords, which are not printed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from perdure.queues import (
    Address,
    BadAddress,
    Namespace,
    QueueError,
    check_name,
)
from perdure.queues.transport.address import Node

DATA = Path("/data")


def parse(text: str) -> Address:
    return Address.parse(text, data_dir=lambda: DATA)


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        "redis://localhost:6380/2",
        "redis://user:secret@host:6379/0?db=3",
        "rediss://host",
        "redis://[::1]:6379",
        "unix:///run/redis.sock",
        "unix://user:secret@/run/redis.sock?db=1",
        "redis://host?protocol=2",
        "rediss://host?ssl_ca_certs=/ca.pem&ssl_cert_reqs=required",
        "redis+cluster://user:secret@one:7000,two,[::1]:7001",
        "redis+cluster://one/0",
        "rediss+cluster://one?ssl_certfile=/c.pem&ssl_keyfile=/k.pem",
        "redis+sentinel://one,two:26380/jobs",
        "rediss+sentinel://user:secret@one/jobs/2?sentinel_username=u&sentinel_password=p",
    ],
)
def test_a_valid_url_is_kept_unchanged(url: str) -> None:
    address = parse(url)
    assert (address.url, address.directory, address.embedded) == (url, None, False)
    assert parse(f"  {url}\n") == address


@pytest.mark.parametrize(
    ("text", "directory"),
    [
        ("embedded:", "/data"),
        ("embedded://", "/data"),
        ("embedded:/var/lib/perdure", "/var/lib/perdure"),
        ("embedded:///var/lib/perdure", "/var/lib/perdure"),
        ("embedded:/with%20space", "/with space"),
    ],
)
def test_an_embedded_server_is_named_by_its_directory(text: str, directory: str) -> None:
    address = parse(text)
    assert (address.directory, address.embedded) == (Path(directory), True)
    assert address.shown == f"embedded:{directory}"


def test_the_data_directory_is_looked_up_only_if_needed() -> None:
    def unknown() -> Path:
        raise RuntimeError("there is no home")

    for text in ("redis://host", "unix:///run/redis.sock", "embedded:/data"):
        Address.parse(text, data_dir=unknown)
    with pytest.raises(RuntimeError):
        Address.parse("embedded:", data_dir=unknown)


def test_a_relative_directory_is_resolved_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse("embedded:queue").directory == tmp_path / "queue"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse("embedded:~/queue").directory == tmp_path / "queue"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must be a URL"),
        ("localhost", "must be a URL"),
        ("localhost:6379", "unknown scheme 'localhost'"),
        ("http://host", "unknown scheme 'http'"),
        ("Redis://host", "unknown scheme 'Redis'"),
        ("redis://host:port", "Port could not be cast"),
        ("redis://host:99999", "Port out of range"),
        ("redis://host/zero", "database must be a number"),
        ("redis://host/0?db=x", "database must be a number"),
        ("unix://", "names no socket"),
        ("redis://a:1,b:2", r"write redis\+cluster:// for a Redis Cluster, or redis\+sentinel://.*/service"),
        ("redis://host?protocol=3", r"protocol must be 2 \(RESP2\), got '3'; leave it out"),
        ("redis://host?ssl_ca_certs=/ca.pem", "ssl_ca_certs needs TLS, so the scheme must begin with rediss"),
        ("rediss://host?ssl_cert_reqs=maybe", "none, optional or required, got 'maybe'"),
        ("redis+cluster://host?sentinel_password=x", r"sentinel_password is for redis\+sentinel://"),
        ("redis+cluster://", r"names no host: write redis\+cluster://host:6379"),
        ("redis+cluster:host", "names no host"),
        ("redis+cluster://host:1,,host:2", "one of the hosts is empty"),
        ("redis+cluster://host:port", "one of the hosts is not host:port"),
        ("redis+cluster://host:99999", "Port out of range"),
        ("redis+cluster://::1:6379", "write an IPv6 address in brackets"),
        ("redis+cluster://host/1", "a Redis Cluster has database 0 only; leave out '1'"),
        ("redis+cluster://host?db=2", "database 0 only"),
        ("redis+sentinel://host", r"names no service: write redis\+sentinel://host:26379/service"),
        ("redis+sentinel://host/", "names no service"),
        ("redis+sentinel:///service", r"names no host: write redis\+sentinel://host:26379/service"),
        ("redis+sentinel://host/service/zero", "database must be a number"),
    ],
)
def test_an_invalid_address_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(BadAddress, match=why):
        parse(text)


def test_the_error_is_a_queue_error_and_a_value_error() -> None:
    assert issubclass(BadAddress, QueueError)
    assert issubclass(BadAddress, ValueError)


PASSWORDS = st.from_regex(r"S3cret[A-Za-z0-9%._:@-]{0,20}!", fullmatch=True)


@given(PASSWORDS, st.sampled_from(["redis", "rediss", "unix", "redis+cluster", "rediss+sentinel"]))
def test_a_password_is_never_shown(password: str, scheme: str) -> None:
    shown = Address(f"{scheme}://user:{password}@host/0").shown
    assert "S3cret" not in shown
    assert shown == f"{scheme}://user:***@host/0"


@pytest.mark.parametrize(
    "text",
    [
        "redis://u:s3cret@host/x",
        "redis://u:s3cret@host:port",
        "http://u:s3cret@host",
        "redis://:s3cret@host:99999",
        "unix://u:s3cret@",
        "redis://u:s3cret/x@host",
        "redis+cluster://u:s3cret/x@host",
        "redis+cluster://u:s3cret@",
        "redis+cluster://u:s3cret@host:port",
        "redis+sentinel://u:s3cret@host",
        "redis+sentinel://host?sentinel_password=s3cret",
        "redis://host/x?password=s3cret",
        "rediss://host/x?a=b&ssl_password=s3cret@y&c=d",
    ],
)
def test_a_password_is_not_shown_in_an_error_either(text: str) -> None:
    with pytest.raises(BadAddress) as refused:
        parse(text)
    assert "s3cret" not in str(refused.value)


def test_the_nodes_of_a_cluster_are_parsed() -> None:
    address = parse("rediss+cluster://user:s3%40cret@one:7000,two,[::1]:7001?ssl_ca_certs=/a%20b.pem&db=0")
    assert (address.clustered, address.encrypted, address.service) == (True, True, None)
    assert address.nodes == (Node("one", 7000), Node("two", 6379), Node("::1", 7001))
    url = address.url_of(Node("::1", 7001))
    assert url == "rediss://user:s3%40cret@[::1]:7001/?ssl_ca_certs=%2Fa+b.pem&db=0"
    assert address.shown == "rediss+cluster://user:***@one:7000,two,[::1]:7001?ssl_ca_certs=/a%20b.pem&db=0"


def test_sentinels_have_separate_credentials() -> None:
    address = parse("redis+sentinel://user:data@one,two:26380/jobs/2?sentinel_username=u&sentinel_password=watch&db=2")
    assert (address.clustered, address.encrypted, address.service) == (False, False, "jobs")
    assert address.nodes == (Node("one", 26379), Node("two", 26380))
    assert address.url_of(Node("primary", 6379)) == "redis://user:data@primary:6379/2?db=2"
    assert address.url_of_sentinel(Node("one", 26379)) == "redis://one:26379/?username=u&password=watch"
    assert "data" not in address.shown
    assert "watch" not in address.shown


def test_a_standalone_server_has_no_nodes() -> None:
    for url in ("redis://host", "unix:///run/redis.sock", "embedded:/data"):
        address = parse(url)
        assert (address.nodes, address.service, address.clustered) == ((), None, False)


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True))
def test_a_valid_name_is_accepted(name: str) -> None:
    assert check_name("queue", name) == name
    assert Namespace(name).partition(name).queue == name


@pytest.mark.parametrize("name", ["", " ", "a b", "a:b", "{a}", "a}", "~a", "-a", ".a", "ä", "a\n", "*", "a" * 65])
def test_an_invalid_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must be 1 to 64 letters"):
        check_name("queue", name)
    with pytest.raises(ValueError, match="namespace"):
        Namespace(name)
