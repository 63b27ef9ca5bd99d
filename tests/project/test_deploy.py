"""deploy/: the Dockerfile's own steps in a clean folder, the unit's own command, and what the files tell Valkey.

No container engine, no Kubernetes and no systemd is needed: what they would do with the files is done here, with the
files' own text. test_deploy_tools.py has the checks by the tools of each format, and deploys under load.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import string
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import redis
import yaml
from perdure import Producer, TaskHandle, Unavailable
from perdure.queues.transport.rights import ROLES
from perdure.worker.settings import load_settings

from tests.support.notify_socket import NotifySocket
from tests.support.paths import ROOT
from tests.support.servers import SYSTEM, RedisServer, find_program

pytestmark = [pytest.mark.processes, pytest.mark.integration]

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "perdure-worker@.service"
VALKEY = DEPLOY / "valkey"

WATCHED = 0.3
"""Seconds of a watchdog that is shorter than that of the unit."""

LEAVING = 15.0
"""Seconds beyond a worker's grace: cancelled runs give their tasks back, it leaves the groups, and its supervisor tells
whom it had to kill.
"""


# Reading the files


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, continued lines joined."""
    lines = "\n".join(line for line in dockerfile.splitlines() if line.strip() and not line.startswith("#"))
    return [(head, rest.strip()) for head, _, rest in (line.partition(" ") for line in _joined(lines))]


def _joined(text: str) -> list[str]:
    return text.replace("\\\n", " ").splitlines()


def substituted(text: str, values: Mapping[str, str]) -> str:
    return string.Template(text).substitute(values)


@dataclass
class Image:
    """What a Dockerfile says, and what its builder stage made below `folder`, which stands for the image's root."""

    folder: Path
    args: dict[str, str]
    build: list[tuple[str, str]]
    final: list[tuple[str, str]]

    @classmethod
    def read(cls, path: Path, folder: Path) -> Image:
        everything = instructions(path.read_text())
        starts = [number for number, (name, _) in enumerate(everything) if name == "FROM"]
        args = dict(value.split("=", 1) for name, value in everything[: starts[0]] if name == "ARG")
        args["PREFIX"] = str(folder / args["PREFIX"].lstrip("/"))
        return cls(folder, args, everything[starts[0] : starts[1]], everything[starts[1] :])

    @property
    def prefix(self) -> Path:
        return Path(self.args["PREFIX"])

    @property
    def workdir(self) -> Path:
        return self.folder / self.one("WORKDIR").lstrip("/")

    def one(self, name: str) -> str:
        """The only instruction of that name in the final stage."""
        (found,) = (value for instruction, value in self.final if instruction == name)
        return found

    def run_builder(self) -> None:
        """Carry out the builder stage, its RUN steps by the shell as they stand, with PREFIX set elsewhere."""
        workdir = self.folder
        for name, value in self.build:
            match name:
                case "FROM":
                    pass
                case "ARG":
                    argument, has_default, default = value.partition("=")
                    assert has_default or argument in self.args
                    self.args.setdefault(argument, default)
                case "WORKDIR":
                    workdir = self.folder / value.lstrip("/")
                    workdir.mkdir(parents=True)
                case "COPY":
                    copy(value, workdir)
                case "RUN":
                    environment = build_environment() | self.args
                    run(["/bin/sh", "-c", value], cwd=workdir, env=environment)
                case _:
                    pytest.fail(f"the test has no answer to {name}")

    def environment(self) -> dict[str, str]:
        """The environment of a container: ENV, and what the engine sets for the user."""
        values = {"PATH": os.defpath, **self.args}
        given = [pair.split("=", 1) for pair in shlex.split(self.one("ENV"))]
        environment = {name: substituted(value, values) for name, value in given}
        return {"HOME": str(self.workdir), **environment}

    def command(self, *args: str) -> list[str]:
        """What a container runs: ENTRYPOINT with `args`, else with CMD."""
        return [*json.loads(self.one("ENTRYPOINT")), *(args or json.loads(self.one("CMD")))]


def copy(value: str, workdir: Path) -> None:
    """COPY from the repository, without what Dockerfile.dockerignore leaves out."""
    *sources, target = value.split()
    ignored = [line for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] not in "#"]
    assert all(line.startswith("**/") for line in ignored), "only patterns of this form are understood here"

    def left_out(_: str, names: list[str]) -> set[str]:
        return {name for name in names for line in ignored if fnmatch(name, line.removeprefix("**/"))}

    for source in sources:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, workdir / target, ignore=left_out)
        else:
            shutil.copy(ROOT / source, workdir / target)


def build_environment() -> dict[str, str]:
    """The developer's, with this Python as `python`, and without what would lead back to the checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return kept | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}"}


def call(
    command: Sequence[str | Path], *, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def run(command: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str]) -> str:
    """What a command prints that must not fail."""
    done = call(command, cwd=cwd, env=env)
    assert done.returncode == 0, f"{command} exits with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def read_unit(text: str) -> dict[str, list[str]]:
    """Settings of a unit file, all sections together; a setting may stand there more than once."""
    settings: dict[str, list[str]] = {}
    for line in _joined(text):
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            settings.setdefault(name, []).append(value)
    return settings


def read_environment_file(path: Path) -> dict[str, str]:
    lines = (line for line in path.read_text().splitlines() if line and not line.startswith("#"))
    return dict(line.split("=", 1) for line in lines)


def read_compose() -> dict[str, Any]:
    compose: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return compose


def seconds(text: str) -> float:
    assert re.fullmatch(r"\d+s?", text)
    return float(text.removesuffix("s"))


# What stands in for the engine


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    """The installation that the builder stage makes, with the example application beside it."""
    with tempfile.TemporaryDirectory(prefix="perdure-deploy-") as name:
        image = Image.read(DEPLOY / "Dockerfile", Path(name))
        image.run_builder()
        image.workdir.mkdir()
        shutil.copy(DEPLOY / "app.py", image.workdir)
        yield image


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server with the options of valkey.conf, without its users."""
    program = find_program(SYSTEM) or find_program("bundled")
    assert program is not None
    settings = [shlex.split(line) for line in (VALKEY / "valkey.conf").read_text().splitlines() if line[:1] not in "#"]
    options = [word for name, value in settings if name != "dir" for word in (f"--{name}", value)]
    server = RedisServer(program, tuple(options)).start()
    yield server
    server.stop()


@dataclass
class Guarded:
    """A server that start.sh has started, and the password of each role."""

    file: Path
    passwords: dict[str, str]

    def url(self, role: str) -> str:
        return f"unix://{role}:{self.passwords[role]}@{self.file}"

    def client(self, role: str, password: str | None = None) -> redis.Redis:
        secret = self.passwords[role] if password is None else password
        return redis.Redis(unix_socket_path=str(self.file), username=role, password=secret, protocol=2)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    """What start.sh makes of users.acl and of the passwords that secrets.sh prints."""
    program = find_program("bundled")
    assert program is not None
    printed = run(["/bin/sh", DEPLOY / "secrets.sh"], cwd=tmp_path, env=os.environ)
    secrets = dict(line.split("=") for line in printed.splitlines())
    passwords = {name.removesuffix("_PASSWORD").lower(): value for name, value in secrets.items()}
    for role, password in passwords.items():
        (tmp_path / f"{role}-password").write_text(f"{password}\n")
    valkey = tmp_path / "valkey"
    shutil.copytree(VALKEY, valkey)
    settings = (valkey / "valkey.conf").read_text()
    assert settings.count("dir /data") == 1
    (valkey / "valkey.conf").write_text(settings.replace("dir /data", f"dir {tmp_path}"))
    environment = os.environ | {
        "SECRETS": str(tmp_path),
        "USERS": str(tmp_path / "users.acl"),
        "SERVER": str(program),
    }
    file = tmp_path / "valkey.sock"
    command = ["/bin/sh", str(valkey / "start.sh"), "--port", "0", "--unixsocket", str(file)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        guarded = Guarded(file, passwords)
        try:
            with guarded.client("health", "any") as client:
                until_it_answers(client)
            yield guarded
        finally:
            process.terminate()


def until_it_answers(client: redis.Redis) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            client.ping()
        except redis.ConnectionError:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.02)
        else:
            return


@pytest.fixture
async def producer(server: RedisServer, namespace_name: str) -> AsyncIterator[Producer]:
    async with Producer(server.url, namespace=namespace_name) as producer:
        yield producer


@dataclass
class Program:
    """How a worker is started. `prefix`: a command in front of the worker's own."""

    command: list[str]
    environment: dict[str, str]
    folder: Path
    prefix: list[str] = field(default_factory=list)

    @contextmanager
    def started(self) -> Iterator[Worker]:
        command = [*self.prefix, *self.command]
        with (
            tempfile.TemporaryFile() as log,
            subprocess.Popen(command, env=self.environment, cwd=self.folder, stderr=log) as process,
        ):
            try:
                yield Worker(process, behind=bool(self.prefix))
            finally:
                process.kill()
                process.wait()
                log.seek(0)
                print(log.read().decode())  # noqa: T201  # pytest shows it when the test fails


@dataclass
class Worker:
    """A worker process, or the one that stands `behind` the process that was started."""

    process: subprocess.Popen[bytes]
    behind: bool

    @property
    def pid(self) -> int:
        parent = self.process.pid
        return int(Path(f"/proc/{parent}/task/{parent}/children").read_text()) if self.behind else parent

    def stop(self, within: float) -> int:
        """SIGTERM, as the engine and systemd send it; returns the exit code."""
        os.kill(self.pid, signal.SIGTERM)
        return self.process.wait(within)


async def enqueue(image: Image, producer: Producer, **args: object) -> TaskHandle[Any]:
    """Put the example's task on its queue by the image's own command line."""
    place = {"PERDURE_REDIS_URL": producer.address.url, "PERDURE_NAMESPACE": producer.namespace.name}
    command = image.command("enqueue", "relay", "--queue", "example", "--args", json.dumps(args))
    task_id = run(command, cwd=image.workdir, env=image.environment() | place).strip()
    handle = await producer.find(task_id)
    assert handle is not None, task_id
    return handle


async def wait_for_step(handle: TaskHandle[Any]) -> None:
    """Wait until a step is recorded."""
    with anyio.fail_after(20):
        async for event in handle.events():
            if event.type == "step_completed":
                return


async def hand_over(image: Image, producer: Producer, program: Program, within: float) -> list[str]:
    """Stop a worker in the middle of the example's task, let a second one end it; returns what the task returns."""
    handle = await enqueue(image, producer, steps=6, seconds=0.2)
    with program.started() as first:
        await wait_for_step(handle)
        assert first.stop(within) == 0
    assert await handle.status() == "queued"
    assert (await handle.record()).crashes == 0
    with program.started() as second:
        result: list[str] = await handle.result(timeout=20)
        assert second.stop(within) == 0
    return result


def carriers(result: Sequence[str]) -> dict[str, list[int]]:
    """The steps of the example's task, by the process that carried each."""
    found: dict[str, list[int]] = {}
    for line in result:
        step, worker = line.removeprefix("step ").split(" by ")
        found.setdefault(worker, []).append(int(step))
    return found


# The image


def test_the_wheel_holds_every_file_of_the_package(image: Image) -> None:
    source = image.folder / "src"
    (wheel,) = (source / "dist").glob("*.whl")
    packed = {name.removeprefix("perdure/") for name in zipfile.ZipFile(wheel).namelist() if "dist-info/" not in name}
    folders = (source / folder for folder in ("queues", "deadletter", "integrations", "worker"))
    files = {str(file.relative_to(source)) for folder in folders for file in folder.rglob("*") if file.is_file()}
    files.remove("queues/STORAGE.md")  # for developers
    assert packed == files | {file.name for file in ROOT.glob("*.py")} | {"py.typed"}
    assert {"context.py", "memory.py"} < packed
    assert "queues/lua/fence.lua" in packed


def test_the_installation_is_outside_the_checkout(image: Image) -> None:
    code = "import perdure, perdure.worker.cli, sys; print(perdure.__file__, *sys.path, sep='\\n')"
    printed = run([image.prefix / "bin" / "python", "-c", code], cwd=image.workdir, env=image.environment())
    assert printed.startswith(str(image.prefix))
    assert str(ROOT) not in printed.split()


def test_the_image_is_built_in_two_stages_and_holds_only_the_result(image: Image) -> None:
    copied = [value for name, value in image.final if name == "COPY"]
    assert copied == ["--from=builder ${PREFIX} ${PREFIX}", "deploy/app.py ./"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"metrics", "web"} <= set(image.args["EXTRAS"].split(",")) <= set(extras)
    assert image.build[0][1].removesuffix(" AS builder") == image.final[0][1]
    assert image.final[0][1] == "python:${PYTHON}-slim"


def test_the_image_has_a_python_that_the_package_names(image: Image) -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    assert f"Programming Language :: Python :: {image.args['PYTHON']}" in classifiers


def test_the_image_runs_as_an_ordinary_user_of_fixed_number(image: Image) -> None:
    user, group = image.one("USER").split(":")
    assert user == group
    assert int(user) > 0
    assert f"--uid {user}" in image.one("RUN")
    assert [name for name, _ in image.final].index("USER") > [name for name, _ in image.final].index("RUN")


def test_the_image_holds_no_setting_that_belongs_to_a_deployment(image: Image) -> None:
    names = {pair.partition("=")[0] for pair in shlex.split(image.one("ENV"))}
    assert {name for name in names if name.startswith("PERDURE_")} == {"PERDURE_LOG_JSON"}


def test_the_image_is_stopped_by_a_signal_that_its_own_process_gets(image: Image) -> None:
    assert image.one("STOPSIGNAL") == "SIGTERM"
    assert image.command()[:4] == ["perdure", "worker", "run", "app.py:app"]  # exec form: no shell in between


@pytest.fixture(params=["a child", "the first process"])
def place(request: pytest.FixtureRequest) -> list[str]:
    """What a worker is started by: nothing; or, as in a container, as process 1 under a user that no file knows."""
    if request.param == "a child":
        return []
    command = shlex.split("unshare --user --map-user=10001 --map-group=10001 --pid --fork --kill-child --")
    if shutil.which("unshare") is None or call([*command, "true"]).returncode:
        pytest.skip("no process namespaces can be made here")
    return command


async def test_the_images_own_command_works_and_hands_over_when_stopped(
    image: Image, server: RedisServer, producer: Producer, namespace_name: str, place: list[str]
) -> None:
    worker = read_compose()["services"]["worker"]
    assert image.command(*worker["command"])[: len(image.command())] == image.command()  # and probes
    environment = image.environment() | worker["environment"]
    environment |= {"PERDURE_REDIS_URL": server.url, "PERDURE_NAMESPACE": namespace_name}
    program = Program(image.command(), environment, image.workdir, place)
    result = await hand_over(image, producer, program, seconds(worker["stop_grace_period"]))
    by = carriers(result)
    assert len(by) == 2 or place  # process 1 has the same number in every container
    assert [step for steps in by.values() for step in steps] == [1, 2, 3, 4, 5, 6]


# compose.yaml


def test_valkey_has_the_settings_that_keep_tasks(server: RedisServer) -> None:
    with redis.Redis(unix_socket_path=str(server.socket), decode_responses=True) as client:
        reported = client.config_get("*")
    expected = {
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",
        "maxmemory": str(1024**3),
        "maxmemory-policy": "noeviction",
    }
    assert {name: reported[name] for name in expected} == expected


def test_compose_keeps_the_data_in_a_volume_and_its_port_to_itself() -> None:
    compose = read_compose()
    server = compose["services"]["valkey"]
    assert "valkey-data:/data" in server["volumes"]
    assert "valkey-data" in compose["volumes"]
    assert "ports" not in server
    assert compose["networks"][server["networks"][0]]["internal"]


def test_composes_health_check_tells_a_server_that_serves_from_one_that_does_not(guarded: Guarded) -> None:
    if shutil.which("redis-cli") is None:
        pytest.skip("no redis-cli on PATH to run the health check with")
    kind, program, *args = read_compose()["services"]["valkey"]["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "valkey-cli")

    def check() -> int:
        return call(["redis-cli", "-s", guarded.file, *args]).returncode

    assert check() == 0
    with guarded.client("operator") as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.acl_whoami()
    args[args.index("health")] = "nobody"
    assert check() != 0  # it answers, with an error: as it does while it loads its data


def test_the_users_of_valkey_are_those_of_the_roles() -> None:
    users = [line for line in (VALKEY / "users.acl").read_text().splitlines() if not line.startswith("#")]
    assert users == [
        "user default off",
        "user health on nopass -@all +ping",
        *(f"user {role.name} on {' '.join(role.rules())}" for role in ROLES),
    ]


def test_valkey_lets_in_users_with_their_passwords_only(guarded: Guarded) -> None:
    for role in ("worker", "operator", "viewer", "producer"):
        with guarded.client(role) as client:
            assert client.ping()
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.set("elsewhere", "1")
        with guarded.client(role, "guessed") as client, pytest.raises(redis.exceptions.AuthenticationError):
            client.ping()
    with guarded.client("health", "any") as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.get("{perdure}:queues")
    with redis.Redis(unix_socket_path=str(guarded.file)) as client, pytest.raises(redis.exceptions.RedisError):
        client.ping()
    with guarded.client("worker") as client:
        assert client.info("persistence")["aof_enabled"] == 1


def test_a_user_without_a_password_file_is_left_out(guarded: Guarded, tmp_path: Path) -> None:
    assert {line.split()[1] for line in (tmp_path / "users.acl").read_text().splitlines()} == {
        "default",
        "health",
        "worker",
        "operator",
        "viewer",
        "producer",
    }
    assert not any(secret in (tmp_path / "users.acl").read_text() for secret in guarded.passwords.values())


async def test_the_server_and_the_workers_of_compose_speak_tls(tmp_path: Path) -> None:
    """The certificates, the options of the server and the query of the URLs, by a server that is built with TLS."""
    program = find_program(SYSTEM)
    if program is None or shutil.which("openssl") is None:
        pytest.skip("the bundled Valkey is built without TLS, and there is no system one (or no openssl)")
    tls = yaml.safe_load((DEPLOY / "compose.tls.yaml").read_text())["services"]
    made = tmp_path / "certificates"
    for _ in range(2):  # the second run renews the certificate with the same authority
        run(["/bin/sh", VALKEY / "certificates.sh", made, "valkey", "localhost"], cwd=tmp_path, env=os.environ)
    assert (made / "server.key").stat().st_mode & 0o077 == 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = [word.replace("/etc/certificates", str(made)) for word in tls["valkey"]["command"]]
    given[given.index("--tls-port") + 1] = str(port)
    options = [word for word in given if word not in ("--port", "0")]  # RedisServer gives them itself
    server = RedisServer(program, ("--bind", "127.0.0.1", *options))
    try:
        try:
            server.start()
        except RuntimeError as error:
            pytest.skip(f"this redis-server is built without TLS: {error}")
        for service in ("worker", "metrics", "dashboard"):
            url = tls[service]["environment"]["PERDURE_REDIS_URL"]
            assert tls[service]["volumes"] == ["./certificates/ca.crt:/etc/certificates/ca.crt:ro"]
            query = url.rpartition("?")[2].replace("/etc/certificates", str(made))
            async with Producer(f"rediss://localhost:{port}/0?{query}") as producer:
                assert await producer.enqueue("double", {"number": 4}, queue="deployed")
        stranger = Producer(f"rediss://localhost:{port}/0")
        stranger.gateway.patience = 0.0
        with pytest.raises(Unavailable, match=r"(?i)certificate verify failed"):
            await stranger.__aenter__()
    finally:
        server.stop()


def test_the_services_of_compose_run_with_the_users_that_they_are_given(image: Image, guarded: Guarded) -> None:
    """Worker, its health check, and the exporter, each with the user of its address in compose.yaml."""
    services = read_compose()["services"]
    environments = {}
    for name in ("worker", "metrics", "dashboard"):
        given = services[name]["environment"]
        role = re.fullmatch(r"redis://(\w+):\$\{(\w+):\?[^}]+\}@valkey:6379/0", given["PERDURE_REDIS_URL"])
        assert role is not None
        assert role[2] == f"{role[1].upper()}_PASSWORD"
        environments[name] = image.environment() | given | {"PERDURE_REDIS_URL": guarded.url(role[1])}
    health = services["worker"]["healthcheck"]["test"][1:]
    options = [
        word
        for word in services["worker"]["command"]
        if word not in ("--health-host", "0.0.0.0", "--health-port", "8080")
    ]
    enqueue = image.command("enqueue", "relay", "--queue", "example", "--args", '{"steps": 2, "seconds": 0.1}')
    with Program(image.command(*options), environments["worker"], image.workdir).started() as worker:
        task_id = run(enqueue, cwd=image.workdir, env=environments["dashboard"]).strip()
        result = ["perdure", "task", "result", task_id, "--timeout", "30"]
        assert "step 2" in run(result, cwd=image.workdir, env=environments["dashboard"])
        deadline = time.monotonic() + 60
        while call(
            health, cwd=image.workdir, env=environments["worker"]
        ).returncode:  # the other worker may still start
            assert time.monotonic() < deadline, "the workers did not become healthy"
        printed = run(image.command("queue", "metrics"), cwd=image.workdir, env=environments["metrics"])
        assert 'perdure_queue_workers{namespace="perdure",queue="example"} 2.0' in printed
        assert worker.stop(seconds(services["worker"]["stop_grace_period"])) == 0


def test_composes_health_check_of_the_worker_is_a_command_that_there_is(
    image: Image, server: RedisServer, namespace_name: str
) -> None:
    check = read_compose()["services"]["worker"]["healthcheck"]
    kind, *command = check["test"]
    assert kind == "CMD"
    environment = image.environment() | {"PERDURE_REDIS_URL": server.url, "PERDURE_NAMESPACE": namespace_name}
    done = call(command, env=environment, cwd=image.workdir)
    assert done.returncode == 1
    assert "not alive: no worker on host" in done.stderr
    assert seconds(check["timeout"]) < seconds(check["interval"])


def test_compose_can_scale_the_worker() -> None:
    worker = read_compose()["services"]["worker"]
    assert not {"container_name", "ports", "hostname", "scale"} & worker.keys()
    assert worker["deploy"] == {"replicas": 3}


def test_compose_starts_workers_after_redis_and_gives_them_time_to_hand_over() -> None:
    worker = read_compose()["services"]["worker"]
    assert worker["depends_on"] == {"valkey": {"condition": "service_healthy"}}
    assert worker["restart"] == "unless-stopped"
    assert seconds(worker["stop_grace_period"]) >= float(worker["environment"]["PERDURE_GRACE"]) + LEAVING
    assert worker["init"]  # it reaps the processes that tasks leave behind


def test_compose_builds_the_image_of_this_repository() -> None:
    worker = read_compose()["services"]["worker"]
    context = DEPLOY / worker["build"]["context"]
    assert context.resolve() == ROOT
    assert (context / worker["build"]["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    assert worker["pull_policy"] == "build"  # never another image of that name


# The systemd unit


@dataclass
class Unit:
    """The unit as it would stand on a host whose root is `folder`, for the instance `1`."""

    folder: Path
    text: str
    settings: dict[str, list[str]]
    environment: dict[str, str]

    @property
    def command(self) -> list[str]:
        """ExecStart: `${NAME}` is one word, `$NAME` is as many as it has."""
        words: list[str] = []
        for word in self.one("ExecStart").split():
            if re.fullmatch(r"\$\w+", word):
                words += self.environment.get(word[1:], "").split()
            else:
                words.append(substituted(word, self.environment))
        return words

    def notifying(self, systemd: NotifySocket, watchdog: float | None = None) -> dict[str, str]:
        """Return the environment that systemd gives to a service of Type=notify.

        watchdog: seconds instead of WatchdogSec.
        """
        limit = seconds(self.one("WatchdogSec")) if watchdog is None else watchdog
        return self.environment | {"NOTIFY_SOCKET": systemd.name, "WATCHDOG_USEC": str(int(limit * 1e6))}

    def one(self, name: str) -> str:
        (value,) = self.settings[name]
        return value


@pytest.fixture
def unit(image: Image, server: RedisServer, namespace_name: str, tmp_path: Path) -> Unit:
    """The unit installed as README.md says: its three places are moved below temporary folders, nothing else."""
    places = {"/opt/perdure": image.prefix, "/etc/perdure": tmp_path, "/srv/perdure": image.workdir}
    text = UNIT.read_text()
    for place, moved in places.items():
        assert place in text
        text = text.replace(place, str(moved))
    text = text.replace("%i", "1")
    shutil.copy(DEPLOY / "worker.env", tmp_path)
    settings = read_unit(text)
    environment = dict(pair.split("=", 1) for line in settings["Environment"] for pair in shlex.split(line))
    for line in settings["EnvironmentFile"]:
        path = Path(line.removeprefix("-"))
        if path.exists() or not line.startswith("-"):
            environment |= read_environment_file(path)
    environment |= {"PATH": os.defpath, "PERDURE_REDIS_URL": server.url, "PERDURE_NAMESPACE": namespace_name}
    return Unit(tmp_path, text, settings, environment)


def test_the_unit_is_one_that_systemd_understands(unit: Unit) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    path = unit.folder / UNIT.name
    path.write_text(unit.text)
    done = call(["systemd-analyze", "verify", "--man=no", path])
    complaints = [line for line in done.stderr.splitlines() if UNIT.stem.rstrip("@") in line]
    assert (done.returncode, complaints) == (0, [])


async def test_the_units_own_command_works_and_hands_over_when_stopped(
    image: Image, unit: Unit, producer: Producer, place: list[str]
) -> None:
    assert unit.one("KillSignal") == "SIGTERM"
    program = Program(unit.command, unit.environment, Path(unit.one("WorkingDirectory")), place)
    result = await hand_over(image, producer, program, seconds(unit.one("TimeoutStopSec")))
    assert [step for steps in carriers(result).values() for step in steps] == [1, 2, 3, 4, 5, 6]


async def test_a_reload_of_the_unit_replaces_its_workers(
    image: Image, unit: Unit, producer: Producer, namespace_name: str
) -> None:
    program, signal_name, target = unit.one("ExecReload").split()
    assert (program, target) == ("/bin/kill", "$MAINPID")
    assert (unit.one("Type"), unit.one("NotifyAccess")) == ("notify", "main")
    handle = await enqueue(image, producer, steps=3, seconds=0.1)
    with (
        NotifySocket(unit.folder / "notify") as systemd,
        Program(unit.command, unit.notifying(systemd), Path(unit.one("WorkingDirectory"))).started() as supervisor,
    ):
        await systemd.until(READY="1")
        before = carriers(await handle.result(timeout=20))
        await systemd.until(STATUS="2 of 2 workers ready")
        call([program, signal_name, str(supervisor.pid)])
        await systemd.until(RELOADING="1")
        await systemd.until(READY="1")
        with anyio.fail_after(20):
            while any(psutil.pid_exists(int(worker.rpartition("-")[2])) for worker in before):  # noqa: ASYNC110
                await anyio.sleep(0.02)
        again = await enqueue(image, producer, steps=3, seconds=0.1)
        after = carriers(await again.result(timeout=20))
        assert supervisor.stop(seconds(unit.one("TimeoutStopSec"))) == 0
        await systemd.until(STOPPING="1")
    assert not before.keys() & after.keys()


async def test_the_watchdog_of_the_unit_gets_no_answer_from_a_stopped_process(
    image: Image, unit: Unit, producer: Producer
) -> None:
    with (
        NotifySocket(unit.folder / "notify") as systemd,
        Program(
            unit.command, unit.notifying(systemd, WATCHED), Path(unit.one("WorkingDirectory"))
        ).started() as supervisor,
    ):
        await systemd.until(WATCHDOG="1")
        os.kill(supervisor.pid, signal.SIGSTOP)
        with anyio.fail_after(20):
            while psutil.Process(supervisor.pid).status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        systemd.drain()
        await anyio.sleep(WATCHED)  # after which systemd would end it
        assert systemd.drain() == []
        os.kill(supervisor.pid, signal.SIGCONT)
        await systemd.until(WATCHDOG="1")
        assert supervisor.stop(seconds(unit.one("TimeoutStopSec"))) == 0


async def test_a_worker_without_supervisor_does_not_answer_the_watchdog_while_its_loop_is_blocked(
    image: Image, unit: Unit, producer: Producer
) -> None:
    (unit.folder / "app.py").write_text(BLOCKS)
    fifo = unit.folder / "fifo"
    os.mkfifo(fifo)
    command = [*unit.command[: unit.command.index("app.py:app") + 1], "--no-supervisor"]
    with (
        NotifySocket(unit.folder / "notify") as systemd,
        Program(command, unit.notifying(systemd, WATCHED), unit.folder).started() as worker,
    ):
        await systemd.until(READY="1")
        await systemd.until(STATUS="0 of 16 slots in use")
        await producer.enqueue("block", {"fifo": str(fifo)}, queue="blocks")
        writer = await open_when_read(fifo)
        systemd.drain()
        await anyio.sleep(WATCHED)
        assert systemd.drain() == []
        os.close(writer)
        await systemd.until(WATCHDOG="1")
        assert worker.stop(seconds(unit.one("TimeoutStopSec"))) == 0
        await systemd.until(STOPPING="1")


BLOCKS = """
from pathlib import Path
from perdure import App

app = App("blocks")

@app.task
async def block(ctx, fifo: str) -> None:
    Path(fifo).read_bytes()
"""


async def open_when_read(fifo: Path) -> int:
    """Open a pipe when another process reads it. That process is blocked until the descriptor is closed."""
    with anyio.fail_after(20):
        while True:
            try:
                return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                await anyio.sleep(0.01)


def test_the_unit_gives_a_worker_more_time_than_its_grace(unit: Unit) -> None:
    assert seconds(unit.one("TimeoutStopSec")) >= float(unit.environment["PERDURE_GRACE"]) + LEAVING
    assert unit.one("KillMode") == "mixed"  # systemd signals the worker before the programs of its steps


def test_the_unit_tries_for_ever_but_not_with_settings_that_cannot_be_meant(unit: Unit) -> None:
    assert unit.one("Restart") == "always"
    assert unit.one("StartLimitIntervalSec") == "0"
    wrong = unit.environment | {"PERDURE_LEASE": "soon"}
    done = call(unit.command, env=wrong, cwd=Path(unit.one("WorkingDirectory")))
    assert str(done.returncode) in unit.one("RestartPreventExitStatus").split(), done.stderr


def test_the_unit_takes_rights_away(unit: Unit) -> None:
    for name in ("DynamicUser", "NoNewPrivileges", "PrivateTmp", "ProtectHome"):
        assert unit.one(name) == "yes"
    assert unit.one("ProtectSystem") == "strict"
    assert unit.one("CapabilityBoundingSet") == ""


# What all of them say


@pytest.mark.parametrize("source", ["compose.yaml", "worker.env"])
def test_every_setting_of_a_worker_is_one_that_it_knows(source: str) -> None:
    compose = read_compose()["services"]["worker"]["environment"]
    given = compose if source == "compose.yaml" else read_environment_file(DEPLOY / source)
    values = {
        name.removeprefix("PERDURE_").lower(): text for name, text in given.items() if name.startswith("PERDURE_")
    }
    settings = load_settings(**values)
    assert (settings.lease, settings.grace) == (15.0, 30.0)
