"""deploy/prometheus and deploy/grafana: rules, alerts and the dashboard, against what workers and queues expose."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any, Final

import pytest
import yaml
from perdure.worker.cli import commands
from perdure.worker.cli.lazy import LazyCommand
from perdure.worker.cli.queue_metrics import exposition, queue_registry
from perdure.worker.runtime.metrics.families import FAMILIES

from tests.support.paths import ROOT

PROMETHEUS: Final = ROOT / "deploy/prometheus"
DASHBOARD: Final = json.loads((ROOT / "deploy/grafana/perdure.json").read_text("utf-8"))
GROUPS: Final = yaml.safe_load((PROMETHEUS / "rules.yml").read_text("utf-8"))["groups"]
RULES: Final = [rule for group in GROUPS for rule in group["rules"]]
ALERTS: Final = [rule for rule in RULES if "alert" in rule]

OF_TARGETS: Final = {"namespace", "job", "instance", "le"}
"""Labels that every metric has, or gets from Prometheus."""


def labels_of_metrics() -> dict[str, set[str]]:
    """Return the labels of each metric of workers and queues, and of the recorded ones."""
    found = {family.name: set(family.labels) for family in FAMILIES.values()}
    for name in re.findall(r"# TYPE (\S+) gauge", exposition(queue_registry("n", lambda: ((), (), (), 0.0)))):
        kind = next((kind for kind in ("queue_lane", "queue", "limit", "budget") if f"perdure_{kind}_" in name), "")
        labels = {"queue_lane": {"queue", "lane"}, "budget": {"budget", "key", "unit"}, "": set[str]()}
        found[name] = labels.get(kind, {kind})
    for rule in RULES:
        if "record" in rule:
            found[rule["record"]] = {"queue", "task", "outcome", "step"}
    return found


LABELS: Final = labels_of_metrics()


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the metrics of an expression, without the suffix of a histogram, and the labels that select from each."""
    for name, selected in re.findall(r"\b(perdure[a-z0-9_:]+)(?:\{([^}]*)\})?", expression):
        base = re.sub(r"_(bucket|count|sum)$", "", name)
        yield base if base in LABELS else name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selected))


def expressions() -> Iterator[tuple[str, str]]:
    """Yield each expression of rules and dashboard with its place."""
    for rule in RULES:
        yield rule.get("alert") or rule["record"], rule["expr"]
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        yield variable["name"], variable["query"]["query"]


@pytest.mark.parametrize(("place", "expression"), list(expressions()))
def test_expressions_name_metrics_and_labels_that_exist(place: str, expression: str) -> None:
    found = list(selectors(expression))
    assert found
    for name, selected in found:
        assert name in LABELS, f"{place}: no worker and no queue exposes {name}"
        assert selected <= LABELS[name] | OF_TARGETS, f"{place}: {name} has no label {selected - LABELS[name]}"


def test_the_dashboard_shows_every_metric_of_workers_and_queues() -> None:
    shown = {name for _, expression in expressions() for name, _ in selectors(expression)}
    assert shown >= LABELS.keys()


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    taken: dict[tuple[int, int], int] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["id"]) == panel["id"], panel["title"]
    assert len(set(taken.values())) == len(DASHBOARD["panels"])
    sources = re.findall(r'"uid": "(\w+)"', json.dumps(DASHBOARD))
    assert set(sources) == {"perdure", "prometheus"}


def is_command(words: list[str]) -> bool:
    """Return whether words begin with a command of `perdure`, and with one of its sub-commands if it has any."""
    command: Any = commands
    for word in words:
        inner = getattr(command, "commands", None)
        if inner is None:
            return True
        if word not in inner:
            return False
        command = inner[word].fetch() if isinstance(inner[word], LazyCommand) else inner[word]
    return not hasattr(command, "commands")


@pytest.mark.parametrize("alert", ALERTS, ids=[alert["alert"] for alert in ALERTS])
def test_an_alert_says_what_is_wrong_and_which_command_helps(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("page", "ticket")
    assert set(alert["annotations"]) == {"summary", "description", "runbook"}
    named = re.findall(r"\bperdure ((?:[a-z]+ ?)+)", alert["annotations"]["runbook"])
    assert named
    for command in named:
        assert is_command(command.split()), command


promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus")


@promtool
@pytest.mark.parametrize("command", [("check", "config", "prometheus.yml"), ("test", "rules", "rules_test.yml")])
def test_promtool_accepts_configuration_and_rules(command: tuple[str, ...]) -> None:
    """`test rules` has a deployment that is well, for which nothing fires, and one for which each alert fires."""
    run = subprocess.run(["promtool", *command], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_each_alert_fires_in_the_tests_of_the_rules() -> None:
    tested = (PROMETHEUS / "rules_test.yml").read_text("utf-8")
    assert {alert["alert"] for alert in ALERTS} == set(re.findall(r'alertname="(\w+)"', tested))
