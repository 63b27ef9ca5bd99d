"""Addresses: valid and invalid URLs, and passwords, which are not printed."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from perdure.queues import Address, ConfigurationError, Namespace, PerdureError
from perdure.queues.keys import check_name
from perdure.queues.transport.address import Node
from perdure.queues.transport.clients import pipelined_connection, sync_client

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


@pytest.mark.parametrize("text", ["unix:/run/redis.sock?db=1", "unix:///run/redis.sock?db=1"])
def test_a_socket_may_be_written_with_one_slash_or_three(text: str) -> None:
    address = parse(text)
    assert (address.url, address.options()) == (
        "unix:///run/redis.sock?db=1",
        {"db": 1, "path": "/run/redis.sock"},
    )


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("redis://", {"host": "localhost", "port": 6379, "db": 0}),
        ("redis://:6380", {"host": "localhost", "port": 6380, "db": 0}),
        ("redis://[::1]/2", {"host": "::1", "port": 6379, "db": 2}),
        (
            "redis://u%40:p%3A%2F@host:1/?db=3&client_name=a%20b&socket_timeout=1&max_connections=2",
            {"host": "host", "port": 1, "db": 3, "username": "u@", "password": "p:/", "client_name": "a b"},
        ),
        ("redis://:p@host?username=u", {"host": "host", "port": 6379, "db": 0, "username": "u", "password": "p"}),
        ("unix://u:p@/a%20b.sock", {"path": "/a b.sock", "username": "u", "password": "p"}),
        (
            "rediss://host?ssl_cert_reqs=none&ssl_check_hostname=false&ssl_min_version=771&ssl_ca_certs=/a.pem",
            {
                "host": "host",
                "port": 6379,
                "db": 0,
                "ssl_cert_reqs": "none",
                "ssl_check_hostname": False,
                "ssl_min_version": ssl.TLSVersion.TLSv1_2,
                "ssl_ca_certs": "/a.pem",
            },
        ),
    ],
)
def test_the_options_of_a_connection_are_read_from_the_url(url: str, options: dict[str, object]) -> None:
    assert parse(url).options() == options


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:p@localhost:6380/2?client_name=me",
        "rediss://localhost?ssl_ca_certs=/ca.pem&ssl_check_hostname=no",
        "unix:/run/redis.sock",
        "unix://u:p@/run/redis.sock?db=1",
    ],
)
def test_both_clients_connect_alike(url: str) -> None:
    address = parse(url)
    names = ("host", "port", "path", "db", "username", "password", "client_name", "ca_certs", "check_hostname")
    asynchronous = pipelined_connection(address, None)
    with sync_client(address, None) as client:
        synchronous = client.connection_pool.make_connection()
    told = [[getattr(connection, name, None) for name in names] for connection in (asynchronous, synchronous)]
    assert told[0] == told[1]


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
        ("redis:host", r"names no host: write redis://host:6379"),
        ("redis:/0", "names no host"),
        ("unix:", "names no socket"),
        ("unix:redis.sock", "must be absolute"),
        ("unix://redis.sock", "names no socket"),
        ("unix://run/redis.sock", "must be absolute"),
        ("unix:///run/a%00b", "null byte"),
        ("unix:///run/redis#1.sock", "write '#' as %23"),
        ("redis://host?host=other", "host cannot be an option"),
        ("redis://host?port=1", "port cannot be an option"),
        ("redis+cluster://host?port=", "port cannot be an option"),
        ("unix:///run/redis.sock?path=/other", "path cannot be an option"),
        ("redis://host?event_dispatcher=x", "unknown option 'event_dispatcher'; known are .*client_name"),
        ("redis://host?maint_notifications_config=x", "unknown option 'maint_notifications_config'"),
        ("redis://host?redis_connect_func=x", "unknown option 'redis_connect_func'"),
        ("redis+sentinel://host/jobs?credential_provider=x", "unknown option 'credential_provider'"),
        ("redis://host?retry", "unknown option 'retry'"),
        ("redis://host?db=1&db=2", "db is given more than once"),
        ("redis://host?socket_keepalive=maybe", "socket_keepalive must be true or false, got 'maybe'"),
        ("redis://host?socket_connect_timeout=soon", "socket_connect_timeout must be a number of seconds"),
        ("unix:///run/redis.sock?db=x", "db must be a number"),
        ("rediss://host?ssl_min_version=99", "ssl_min_version must be the number of a TLS version, such as 771"),
        ("rediss://host?ssl_include_verify_flags=X", "ssl_include_verify_flags must be names of ssl.VerifyFlags"),
        ("redis://host:port", "one of the hosts is not host:port"),
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
    with pytest.raises(ConfigurationError, match=why):
        parse(text)


def test_the_error_is_a_perdure_error_and_a_value_error() -> None:
    assert issubclass(ConfigurationError, PerdureError)
    assert issubclass(ConfigurationError, ValueError)


PASSWORDS = st.from_regex(r"S3cret[A-Za-z0-9%._:@-]{0,20}!", fullmatch=True)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hunter2",
        "redis://host:hunter2/0",
        "redis+cluster://a:1,b:hunter2",
        "redis:user:hunter2@host",
        "user:hunter2@host",
        "hunter2@host:6379",
        "redis://:hunter2?x=1@host",
        "redis://:1?db=hunter2@host",
        "redis://:1?hunter2@host",
        "redis://u:p@ss/hunter2@host:1/0",
        "redis://u:p@ss/hunter2@host/x",
        "redis+cluster://u:p@ss/hunter2@host:1",
        "redis+sentinel://u:p@ss/hunter2@host:1/service",
        "redis://u:hunt er hunter2@host:x",
        "redis://u:hunter2@[host",
        "redis://h?pass%77ord=hunter2&zz=1",
        "rediss://h?ssl_password=hunter2&ssl_cert_reqs=no",
        "redis+sentinel://h/s?sentinel_password=hunter2&no=1",
        "http://u:hunter2@h",
    ],
)
def test_an_error_about_an_address_shows_no_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(url)
    assert "hunter2" not in str(caught.value) + repr(Address(url)) + str(Address(url))


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
    with pytest.raises(ConfigurationError) as refused:
        parse(text)
    assert "s3cret" not in str(refused.value)


def test_the_nodes_of_a_cluster_are_parsed() -> None:
    address = parse("rediss+cluster://user:s3%40cret@one:7000,two,[::1]:7001?ssl_ca_certs=/a%20b.pem&db=0")
    assert (address.clustered, address.encrypted, address.service) == (True, True, None)
    assert address.nodes == (Node("one", 7000), Node("two", 6379), Node("::1", 7001))
    assert address.options(Node("::1", 7001)) == {
        "host": "::1",
        "port": 7001,
        "db": 0,
        "username": "user",
        "password": "s3@cret",
        "ssl_ca_certs": "/a b.pem",
    }
    assert address.shown == "rediss+cluster://user:***@one:7000,two,[::1]:7001?ssl_ca_certs=/a%20b.pem&db=0"


def test_sentinels_have_separate_credentials() -> None:
    address = parse("redis+sentinel://user:data@one,two:26380/jobs/2?sentinel_username=u&sentinel_password=watch&db=2")
    assert (address.clustered, address.encrypted, address.service) == (False, False, "jobs")
    assert address.nodes == (Node("one", 26379), Node("two", 26380))
    assert address.options() == {"host": "one", "port": 26379, "db": 2, "username": "user", "password": "data"}
    assert address.sentinel_options(Node("one", 26379)) == {
        "host": "one",
        "port": 26379,
        "username": "u",
        "password": "watch",
    }
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


@pytest.mark.timeout(30)
def test_the_files_of_an_address_are_regular_files(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for file, problem in (
        (tmp_path / "missing", "the file of ssl_ca_certs does not exist"),
        (pipe, "could not read the file of ssl_ca_certs: .*it must be a regular file, and is a pipe"),
        (Path("/dev/zero"), "could not read the file of ssl_ca_certs: .*it must be a regular file, and is a device"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            Address.parse(f"rediss://host?ssl_ca_certs={file}", data_dir=lambda: tmp_path).check_files()
