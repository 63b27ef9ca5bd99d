"""deploy/, through the checkers of each format: hadolint, kubernetes-validate, kustomize, promtool, systemd, PM2.

A tool that no package of the project brings is left out with a reason: promtool (Debian's package prometheus), kubectl,
systemd-analyze, and pm2, which `make test-build` installs with npm.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from compose_spec.models import ComposeSpecification, Service
from perdure.worker.cli.queue_metrics import exposition, queue_registry
from perdure.worker.settings import load_settings

from benchmarks.deploys import Size, play
from benchmarks.support.deployment import Deployment
from tests.conftest import default_kind
from tests.support.paths import ROOT
from tests.support.servers import RedisServer, find_program

DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = ("production", "trial")
UNITS = sorted(DEPLOY.glob("*.service"))

Resource = Mapping[str, Any]


def call(command: Sequence[str | Path], **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, **more)


def program(name: str, reason: str) -> str:
    """Return the path of a program, or leave the test out."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on PATH: {reason}")
    return found


# Dockerfile and compose.yaml


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    done = call([Path(sys.executable).with_name("hadolint"), DEPLOY / "Dockerfile"])
    assert (done.returncode, done.stdout) == (0, "")


def test_compose_yaml_is_of_the_compose_specification() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert set(ComposeSpecification.model_validate(compose).services or {}) == set(compose["services"])
    known = {field.alias or name for name, field in Service.model_fields.items()}
    for name, service in compose["services"].items():
        assert not service.keys() - known, name


def test_compose_with_tls_is_of_the_compose_specification() -> None:
    """It adds to services of compose.yaml: what it does not have stays."""
    tls = yaml.safe_load((DEPLOY / "compose.tls.yaml").read_text())
    ComposeSpecification.model_validate(tls)
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in tls["services"].items():
        plain = compose["services"][name].get("environment", {}).get("PERDURE_REDIS_URL")
        if plain is not None:
            address = service["environment"]["PERDURE_REDIS_URL"].rpartition("?")[0]
            assert re.sub(r":\?[^}]*", ":?", plain).replace("redis://", "rediss://") == address


def test_images_of_others_are_named_by_their_exact_release() -> None:
    """Three numbers; the digest is left to those who mirror images."""
    files = [*DEPLOY.glob("*.yaml"), *DEPLOY.rglob("valkey/*.yaml"), *DEPLOY.rglob("kubernetes/**/*.yaml")]
    images = [
        match for file in files for match in re.findall(r"^ *(?:- )?image: (\S+)$", file.read_text(), re.MULTILINE)
    ]
    others = [image for image in images if image != "perdure"]
    assert others
    assert [image for image in others if not re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", image)] == []


def test_every_service_of_compose_has_least_rights() -> None:
    for name, service in yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name


def test_every_file_that_compose_mounts_is_in_the_repository() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).exists(), volume


def test_prometheus_scrapes_the_services_of_compose() -> None:
    """Each target is a service, and a port that its command listens on."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    jobs = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    targets = [
        target.split(":") for job in jobs for group in job.get("static_configs", ()) for target in group["targets"]
    ]
    targets += [
        [name, group["port"]] for job in jobs for group in job.get("dns_sd_configs", ()) for name in group["names"]
    ]
    reached = {str(name) for name, port in targets if name != "localhost" and str(port) in services[name]["command"]}
    assert {"worker", "metrics"} <= reached
    assert reached == {name for name, _ in targets if name != "localhost"}


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"].removeprefix("http://").split(":")[0] in services
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "perdure.yaml").read_text())["providers"]
    mounted = {volume.split(":")[1] for volume in services["grafana"]["volumes"]}
    assert f"{provider['options']['path']}/perdure.json" in mounted
    json.loads((DEPLOY / "grafana" / "perdure.json").read_text())


# Kubernetes


def resources(folder: Path) -> list[Resource]:
    """Return all resources of the files of a folder."""
    paths = [path for path in sorted(folder.rglob("*.yaml")) if path.name != "kustomization.yaml"]
    return [each for path in paths for each in yaml.safe_load_all(path.read_text()) if each]


FILES = [
    *(
        path
        for path in sorted(KUBERNETES.rglob("*.yaml"))
        if path.name not in ("kustomization.yaml", "scaledobject.yaml")
    ),
    DEPLOY / "valkey" / "statefulset.yaml",
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("version", ["1.29", "1.34"])
def test_every_resource_is_valid(path: Path, version: str) -> None:
    for each in yaml.safe_load_all(path.read_text()):
        kubernetes_validate.validate(each, version, strict=True)


def test_every_file_of_a_kustomization_exists() -> None:
    for path in [*KUBERNETES.rglob("kustomization.yaml"), DEPLOY / "valkey" / "kustomization.yaml"]:
        content = yaml.safe_load(path.read_text())
        named = [*content.get("resources", ()), *content.get("components", ())]
        named += [file for each in content.get("configMapGenerator", ()) for file in each.get("files", ())]
        for name in named:
            assert (path.parent / name).exists(), f"{path}: {name}"


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> list[Resource]:
    """The resources of an overlay, as kubectl builds them."""
    kubectl = program("kubectl", "it builds the overlays")
    done = call([kubectl, "kustomize", KUBERNETES / "overlays" / request.param])
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def test_the_overlays_are_valid(overlay: list[Resource]) -> None:
    for each in overlay:
        if each["kind"] != "ScaledObject":
            kubernetes_validate.validate(each, "1.34", strict=True)
    assert {each["metadata"].get("namespace") for each in overlay} == {"perdure"}
    kinds = [(each["kind"], each["metadata"]["name"]) for each in overlay]
    assert len(kinds) == len(set(kinds))
    policies = [each["spec"]["podSelector"]["matchLabels"] for each in overlay if each["kind"] == "NetworkPolicy"]
    for pod in pods(overlay):
        assert any(policy.items() <= pod["metadata"]["labels"].items() for policy in policies)


def test_the_autoscaler_owns_the_number_of_workers(overlay: list[Resource]) -> None:
    scaled = [each for each in overlay if each["kind"] == "ScaledObject"]
    worker = next(
        each for each in overlay if each["metadata"]["name"] == "perdure-worker" and each["kind"] == "Deployment"
    )
    assert ("replicas" in worker["spec"]) is not bool(scaled)
    assert all(each["spec"]["scaleTargetRef"]["name"] == "perdure-worker" for each in scaled)


def pods(found: Sequence[Resource]) -> list[Resource]:
    return [each["spec"]["template"] for each in found if each["kind"] in ("Deployment", "StatefulSet")]


def test_every_pod_has_least_rights_and_says_what_it_needs() -> None:
    found = pods([each for path in FILES for each in yaml.safe_load_all(path.read_text())])
    assert len(found) == 4
    for pod in found:
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"].keys() == {"requests", "limits"}
            assert container["livenessProbe"]
            assert container["readinessProbe"]


def worker_pod() -> Mapping[str, Any]:
    (deployment,) = (
        each
        for each in resources(KUBERNETES / "base")
        if each["metadata"]["name"] == "perdure-worker" and each["kind"] == "Deployment"
    )
    spec: Mapping[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def test_a_pod_has_more_time_than_the_grace_of_its_worker() -> None:
    kustomization = yaml.safe_load((KUBERNETES / "base" / "kustomization.yaml").read_text())
    literals = dict(line.split("=") for each in kustomization["configMapGenerator"] for line in each["literals"])
    settings = load_settings(**{name.removeprefix("PERDURE_").lower(): value for name, value in literals.items()})
    assert worker_pod()["terminationGracePeriodSeconds"] >= settings.grace + 15


def test_the_probes_ask_the_pages_and_the_port_of_the_worker() -> None:
    (container,) = worker_pod()["containers"]
    (port,) = container["ports"]
    assert str(port["containerPort"]) == container["args"][container["args"].index("--health-port") + 1]
    pages = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert {kind: page["path"] for kind, page in pages.items()} == {
        "startup": "/readyz",
        "liveness": "/livez",
        "readiness": "/readyz",
    }
    assert {page["port"] for page in pages.values()} == {port["name"]}


# The signal of the autoscaler


def triggers() -> list[Mapping[str, Any]]:
    (scaled,) = resources(KUBERNETES / "components" / "keda")
    found: list[Mapping[str, Any]] = scaled["spec"]["triggers"]
    return found


def test_the_autoscaler_asks_for_metrics_that_exist() -> None:
    registry = queue_registry("perdure", lambda: ([], [], [], 0.0))
    exported = set(re.findall(r"^# TYPE (\w+)", exposition(registry), re.M))
    for trigger in triggers():
        names = set(re.findall(r"perdure_\w+", trigger["metadata"]["query"].replace('"perdure"', "")))
        assert names <= exported
        assert names


QUEUE = ("depth", "in_flight", "overdue_seconds", "limited")

CASES: Mapping[str, tuple[Mapping[str, str], Mapping[str, float | None]]] = {
    "a fresh namespace": ({"schedule_overdue_seconds": "0"}, {"messages": 0, "drain-time": 0}),
    "no work": (
        {
            "schedule_overdue_seconds": "0",
            **dict.fromkeys((f"queue_{name}" for name in QUEUE), "0"),
            "queue_drain_time_seconds": "0",
        },
        {"messages": 0, "drain-time": 0},
    ),
    "work, and nothing is settled": (
        {
            "schedule_overdue_seconds": "0",
            "queue_depth": "40",
            "queue_in_flight": "2",
            "queue_overdue_seconds": "0",
            "queue_limited": "0",
        },
        {"messages": 42, "drain-time": 0},
    ),
    "a delayed task is due, and no worker runs": (
        {
            "schedule_overdue_seconds": "0",
            "queue_depth": "0",
            "queue_in_flight": "0",
            "queue_overdue_seconds": "30",
            "queue_limited": "0",
            "queue_drain_time_seconds": "0",
        },
        {"messages": 1, "drain-time": 0},
    ),
    "a schedule is due, and no worker runs": (
        {"schedule_overdue_seconds": "30"},
        {"messages": 1, "drain-time": 0},
    ),
    "a hundred tasks wait for a limit": (
        {
            "schedule_overdue_seconds": "0",
            "queue_depth": "0",
            "queue_in_flight": "4",
            "queue_overdue_seconds": "0",
            "queue_limited": "100",
            "queue_drain_time_seconds": "7",
        },
        {"messages": 5, "drain-time": 7},
    ),
    "Redis is away": ({}, {"messages": None, "drain-time": None}),
}


def test_the_autoscaler_is_right_about_every_state(tmp_path: Path) -> None:
    """promtool evaluates its queries; no value means that KEDA changes nothing."""
    promtool = program("promtool", "it is in Debian's package prometheus")
    queries = {trigger["name"]: trigger["metadata"]["query"] for trigger in triggers()}
    tests = []
    for name, (series, expected) in CASES.items():
        labels = {each: "" if each.startswith("schedule") else ',queue="q"' for each in series}
        tests.append(
            {
                "name": name,
                "interval": "1m",
                "input_series": [
                    {"series": f'perdure_{each}{{namespace="perdure"{labels[each]}}}', "values": value}
                    for each, value in series.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": queries[trigger],
                        "eval_time": "0m",
                        "exp_samples": [] if value is None else [{"labels": "{}", "value": value}],
                    }
                    for trigger, value in expected.items()
                ],
            }
        )
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "1m", "tests": tests}))
    done = call([promtool, "test", "rules", path])
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_scaled_while_the_autoscaler_sees_no_value() -> None:
    for trigger in triggers():
        assert trigger["metadata"]["ignoreNullValues"] == "false"


# systemd


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_understands_every_unit(path: Path, tmp_path: Path) -> None:
    analyze = program("systemd-analyze", "it verifies the units")
    text = path.read_text()
    installed = "/opt/perdure/bin/perdure"
    assert installed in text
    unit = tmp_path / path.name
    unit.write_text(text.replace(installed, str(Path(sys.executable).with_name("perdure"))))
    done = call([analyze, "verify", "--man=no", unit])
    complaints = [line for line in done.stderr.splitlines() if path.stem.rstrip("@") in line]
    assert (done.returncode, complaints) == (0, [])


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_the_command_of_a_unit_has_its_options(path: Path) -> None:
    (line,) = re.findall(r"^ExecStart=\S+ (.+)$", path.read_text(), re.M)
    words = [word for word in line.split() if "$" not in word]
    command = words[: next((at for at, word in enumerate(words) if word.startswith("-")), len(words))]
    options = [word for word in words if word.startswith("--")]
    usage = call([Path(sys.executable).with_name("perdure"), *command, "--help"], env=os.environ | {"COLUMNS": "200"})
    assert usage.returncode == 0, usage.stderr
    for option in options:
        assert option in usage.stdout


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_exposes_little(path: Path, tmp_path: Path) -> None:
    analyze = program("systemd-analyze", "it rates the units")
    unit = tmp_path / path.name.replace("@", "@1" if "@" in path.name else "@")
    unit.write_text(path.read_text())
    done = call([analyze, "security", "--offline=yes", "--no-pager", "--json=short", "--threshold=30", unit])
    assert done.returncode == 0, done.stdout + done.stderr


# Deploys under load


SIZE = Size(rate=10.0, step=0.2, before=1.0, after=1.0)


@pytest.fixture
def deployment(namespace_name: str) -> Any:
    found = find_program(default_kind())
    assert found is not None
    server = RedisServer(found, ("--save", "", "--appendonly", "yes", "--appendfsync", "everysec")).start()
    yield Deployment(server.url, namespace_name)
    server.stop()


def pm2() -> Path:
    installed = ROOT / "build" / "npm" / "node_modules" / ".bin" / "pm2"
    return installed if installed.exists() else Path(program("pm2", "make test-build installs it with npm"))


@pytest.mark.processes
@pytest.mark.integration
@pytest.mark.parametrize("scene", ["reload", "pods", "pm2-reload", "pm2-kill"])  # the others: make bench-deploys
async def test_a_deploy_under_load_loses_nothing_and_repeats_no_recorded_step(
    scene: str, deployment: Deployment
) -> None:
    outcome = await play(scene, SIZE, deployment, pm2() if scene.startswith("pm2") else None)
    assert (outcome.lost, outcome.repeated) == (0, 0), outcome
    assert outcome.by_new_code > 0
    if scene != "pm2-kill":
        assert outcome.cut_off == 0  # a step ends within the grace
    assert outcome.tasks >= SIZE.rate * (SIZE.before + SIZE.after) / 2
