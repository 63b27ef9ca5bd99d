"""The benchmarks beside the peers: the harness runs with Perdure alone, and the page comes out of its data.

No peer is installed here, and nothing asks how large a figure is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.peers import results
from benchmarks.peers.lines import Line, Measure, measures
from benchmarks.peers.measurements import Facts
from benchmarks.peers.page import main as draw
from benchmarks.peers.processes import Failed, started
from benchmarks.peers.rounds import measure
from benchmarks.peers.setups import PERDURE, QUEUES, Choice, Peer
from benchmarks.peers.sizes import FULL, QUICK
from benchmarks.peers.summary import BEGIN, END
from benchmarks.peers.sweep import Swept
from benchmarks.support.origin import Origin
from tests.support.paths import ROOT

FACTS = Facts(python="3", versions={"other": "1.0"}, recovery=60, recovery_where="Worker(timeout)")
OTHER = replace(PERDURE, key="other", name="Other & Co", environment="other")
BROKEN = replace(PERDURE, key="broken", name="Broken", environment="broken")

ORIGIN = Origin("python -m benchmarks.peers --quick", "abc", "2026-01-01", "2 cores (a processor)")
ABOUT = results.About(ORIGIN.line(), quick=True)


def made_up(rate: dict[str, list[float]]) -> results.Data:
    """A run of one measure whose rounds find the given rates; a peer without any fails."""
    left = {key: iter(values) for key, values in rate.items()}

    def round_(peer: Peer, *_: object) -> dict[str, float]:
        try:
            return {"noop": next(left[peer.key])}
        except StopIteration:
            raise Failed("it <broke>\nin a long story") from None

    peers = [PERDURE, OTHER, BROKEN]
    what = Measure("noop", [Line("noop", "No-op tasks", "tasks/s", "how")], peers, round_, lambda size: 1.0)
    reported: dict[str, Facts | str] = {"perdure": FACTS, "other": FACTS, "broken": "not installed: no such package"}
    size = replace(QUICK, rounds=3)
    found = measure([what], reported, size, None, {}, lambda said: None)
    return results.as_data(ABOUT, size, [what], reported, found, [])


def cells(data: results.Data) -> dict[str, Any]:
    return {cell["peer"]: cell for cell in data["lines"][0]["cells"]}


def page(folder: Path, data: results.Data, **own: results.Data) -> str:
    """The page, drawn from data in a folder."""
    files = {"peers": data, "own": own.get("own"), "fsync": own.get("fsync")}
    for name, found in files.items():
        if found is not None:
            results.write(found, folder / f"{name}.json")
    readme = folder / "README.md"
    readme.write_text(f"# Title\n\n{BEGIN}\nformer text\n{END}\n\nlast line\n")
    draw(folder / "peers.json", folder / "own.json", folder / "fsync.json", readme, folder / "benchmarks.md")
    return (folder / "benchmarks.md").read_text()


def test_rounds_become_a_median_and_a_ratio_to_perdure() -> None:
    found = cells(made_up({"perdure": [10.0, 30.0, 20.0], "other": [5.0, 4.0, 6.0]}))

    assert found["perdure"]["median"] == 20.0
    assert found["other"]["median"] == 5.0
    assert found["other"]["times"] == 4.0


def test_rounds_are_interleaved() -> None:
    order: list[str] = []

    def round_(peer: Peer, *_: object) -> dict[str, float]:
        order.append(peer.key)
        return {"noop": 1.0}

    line = Line("noop", "No-op tasks", "tasks/s", "how")
    what = Measure("noop", [line], [PERDURE, OTHER], round_, lambda size: 1.0)
    measure([what], {"perdure": FACTS, "other": FACTS}, replace(QUICK, rounds=3), None, {}, lambda said: None)

    assert order == ["perdure", "other"] * 3


def test_the_sweep_measures_the_fastest_setting_beside_the_defaults() -> None:
    arq = next(peer for peer in QUEUES if peer.key == "arq")
    first, second, *_ = arq.choices
    rates = {"default": 320.0, first.name: 2_000.0, second.name: 2_400.0, "of an older version": 9_000.0}
    swept = Swept.of([{"peer": "arq", "name": name, "rate": rate} for name, rate in rates.items()])

    assert swept.best["arq"].name == f"arq, {second.name}"
    assert swept.best["arq"].extra["BENCH_POLL"] == "0.01"
    assert swept.rates == {"arq": 320.0, f"arq: {second.name}": 2_400.0}
    noop, bulk, *_ = measures(QUICK, swept.best)
    assert [peer.key for peer in noop.peers if peer.project == "arq" or peer.key == "arq"] == [
        "arq",
        f"arq: {second.name}",
    ]
    assert [peer.key for peer in bulk.peers if "arq" in peer.key] == ["arq"]


def test_where_the_defaults_are_fastest_there_is_no_other_setting() -> None:
    saq = next(peer for peer in QUEUES if peer.key == "saq")
    rows = [{"peer": "saq", "name": "default", "rate": 1_500.0}]
    rows += [{"peer": "saq", "name": choice.name, "rate": None} for choice in saq.choices]

    assert Swept.of(rows).best == {}


def test_a_setup_gets_tasks_for_twice_the_time_limit() -> None:
    size = replace(FULL, limit=3.0)

    assert size.for_rate(15_000.0).tasks == 90_000
    assert size.for_rate(None) == size


def test_a_project_with_two_settings_has_the_ratio_of_the_better_one(tmp_path: Path) -> None:
    slow = replace(OTHER, timer="it looks every 0.5 s")
    tuned = OTHER.at(Choice("look every 10 ms"))
    values = {"perdure": 20.0, "other": 2.0, tuned.key: 5.0}
    line = Line("noop", "No-op tasks", "tasks/s", "how")
    what = Measure(
        "noop", [line], [PERDURE, slow, tuned], lambda peer, *_: {"noop": values[peer.key]}, lambda size: 1.0
    )
    reported: dict[str, Facts | str] = dict.fromkeys(values, FACTS)
    size = replace(QUICK, rounds=2)
    tried = [{"peer": "other", "name": "look every 10 ms", "unit": "tasks/s", "rate": 5.0, "reason": None}]
    found = measure([what], reported, size, None, {}, lambda said: None)
    text = page(tmp_path, results.as_data(ABOUT, size, [what], reported, found, tried))

    assert "| Other & Co | 4.00 x |" in text
    assert "| Other & Co | 2.00 | - |" in text
    assert "| Other & Co, look every 10 ms | 5.00 | 4.00 x |" in text
    assert "- Other & Co: it looks every 0.5 s." in text
    assert "- Other & Co, look every 10 ms: the rounds differ by less than 1%; no timer of its own" in text
    assert "| Other & Co | look every 10 ms | 5.00 | tasks/s | best |" in text


def test_the_summary_names_the_best_setting_of_each_project(tmp_path: Path) -> None:
    page(tmp_path, made_up({"perdure": [20.0, 20.0, 20.0], "other": [5.0, 4.0, 6.0]}))

    text = (tmp_path / "README.md").read_text()
    assert text.startswith(
        f"# Title\n\n{BEGIN}\n\n{ORIGIN.line()}\n\nOne worker process ran 20.0 no-op tasks per second"
    )
    assert "Other & Co 5.00. Perdure was 4.00 times as fast as the best of them." in " ".join(text.split())
    assert text.endswith(f"\n\n{END}\n\nlast line\n")
    assert "former text" not in text


def test_the_summary_names_the_best_project_on_postgres(tmp_path: Path) -> None:
    data = made_up({"perdure": [20.0] * 3, "other": [5.0] * 3})
    peers = [{**peer, "store": "postgres"} if peer["key"] == "other" else peer for peer in data["peers"]]
    page(tmp_path, {**data, "peers": peers})

    text = " ".join((tmp_path / "README.md").read_text().split())
    assert "On Postgres Other & Co ran 5.00, with each transition on disk; Perdure was 4.00 times as fast" in text


def test_a_run_replaces_the_lines_that_it_measured_and_keeps_the_others() -> None:
    old = made_up({"perdure": [20.0] * 3, "other": [5.0] * 3})
    echo = {**old["lines"][0], "key": "echo", "run": {**old["lines"][0]["run"], "note": "an older run"}}
    new = made_up({"perdure": [30.0] * 3, "other": [5.0] * 3})
    merged = results.merge({**old, "lines": [*old["lines"], echo]}, new)

    assert {line["key"]: line["cells"][0]["median"] for line in merged["lines"]} == {"noop": 30.0, "echo": 20.0}
    assert merged["lines"][1]["run"]["note"] == "an older run"
    assert results.merge({"format": 1, "lines": []}, new) == new


def test_a_peer_that_fails_has_its_reason_in_place_of_a_figure_and_ends_nothing() -> None:
    found = cells(made_up({"perdure": [1.0, 2.0, 3.0], "other": [1.0]}))

    assert found["broken"]["reason"] == "not installed: no such package"
    assert found["broken"]["values"] == []
    assert found["other"]["values"] == [1.0]
    assert found["other"]["reason"].startswith("it <broke>")
    assert found["perdure"]["values"] == [1.0, 2.0, 3.0]


def test_the_page_has_every_peer_with_its_figure_or_reason_and_its_promise(tmp_path: Path) -> None:
    text = page(tmp_path, made_up({"perdure": [20.0, 20.0, 20.0], "other": []}))

    assert "| Perdure | 20.0 | - | late, in the script that stores the result | at least once" in text
    assert "| Other & Co | it <broke> | - |" in text
    assert "| Broken | not installed: no such package | - |" in text
    assert "![No-op tasks](benchmarks/noop.svg)" in text
    assert ORIGIN.line() in text.splitlines()
    assert "Ignore its figures" in text


def test_the_chart_is_well_formed_and_has_a_bar_per_figure(tmp_path: Path) -> None:
    page(tmp_path, made_up({"perdure": [20.0, 10.0, 30.0], "other": [5.0, 5.0, 5.0]}))

    chart = ElementTree.parse(tmp_path / "benchmarks" / "noop.svg").getroot()
    name = "{http://www.w3.org/2000/svg}"
    bars = chart.findall(f"{name}rect")
    assert len(bars) == 2
    assert float(bars[0].attrib["width"]) == pytest.approx(4 * float(bars[1].attrib["width"]), abs=0.5)
    assert len(chart.findall(f"{name}line")) == 1
    assert "Other & Co" in [text.text for text in chart.findall(f"{name}text")]
    assert "prefers-color-scheme: dark" in (chart.findtext(f"{name}style") or "")


def test_targets_stand_beside_what_was_reached(tmp_path: Path) -> None:
    reached = {"median": 25_000.0, "low": 24_000.0, "high": 26_000.0}
    slow = {"median": 2.0, "low": 1.5, "high": 3.0}
    limit = {"median": 100_000.0, "low": 1.0, "high": 1.0, "what": ""}
    own = {
        "conditions": ["a machine"],
        "rounds": 5,
        "rows": [
            {"key": "throughput", "unit": "tasks/s", "value": reached, "limit": limit},
            {"key": "pick_up_p50", "unit": "ms", "value": slow, "limit": limit},
            {"key": "backlog_read", "unit": "us", "value": slow, "limit": slow, "ratio": 1.25},
        ],
    }
    text = page(tmp_path, made_up({"perdure": [20.0] * 3, "other": [5.0] * 3}), own=own)

    rows = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
    throughput = rows["no-op tasks, one worker, concurrency 32, result kept"]
    assert "≥ 20,000 | 25,000 (24,000-26,000) | met | 100,000" in throughput
    assert "≤ 1.00 | 2.00 (1.50-3.00) | missed" in rows["enqueue to handler start, idle worker, p50"]
    assert "≥ 8.00 | 4.00 x | missed" in rows["the same, as a multiple of the best peer at its best setting"]
    assert "≤ 1.10 | 1.25 x | missed" in rows["the same for a read"]
    assert "not measured" in rows["memory of an idle worker process"]
    assert "\na machine\n" in text


@pytest.mark.processes
def test_what_a_worker_started_ends_with_it_in_whatever_process_group_it_is(tmp_path: Path) -> None:
    program = (
        "import json, os, time\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.setpgrp()\n"
        "    time.sleep(600)\n"
        "time.sleep(0.1)\n"
        "print(json.dumps({'child': child}), flush=True)\n"
        "time.sleep(600)\n"
    )
    with started([sys.executable, "-c", program], os.environ, tmp_path, tmp_path / "log") as session:
        child = session.line(30)["child"]

    state = Path(f"/proc/{child}/stat")
    deadline = time.monotonic() + 10
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the child lives"
        time.sleep(0.01)


@pytest.mark.processes
def test_a_process_that_exits_too_early_is_reported_with_its_stderr(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such option')"]
    with (
        started(command, os.environ, tmp_path, tmp_path / "log") as session,
        pytest.raises(Failed, match="exited early: no such option"),
    ):
        session.line(30)


@pytest.mark.integration
@pytest.mark.processes
def test_the_harness_measures_perdure_in_processes_of_its_own(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    options = ["--quick", "--peer", "perdure", "--only", "noop", "--only", "spread", "--only", "steps"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers", *options, "--output", output],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    found = json.loads(output.read_text())
    assert {line["key"]: line["unit"] for line in found["lines"]} == {
        "noop": "tasks/s",
        "enqueue": "tasks/s",
        "spread": "tasks/s",
        "steps": "steps/s",
    }
    for line in found["lines"]:
        for cell in line["cells"]:
            assert cell["reason"] is None
            assert cell["median"] > 0
    steps = next(line for line in found["lines"] if line["key"] == "steps")
    assert [cell["peer"] for cell in steps["cells"]] == ["perdure", "perdure-fsync"]
    assert {row["peer"]: row["name"] for row in found["sweep"]} == {"perdure": "default", "perdure-fsync": "default"}
    assert found["peers"][0]["recovery"] == 15
    assert "perdure" in found["peers"][0]["versions"]
    assert "![Durable steps" in page(tmp_path, found)


def test_a_peer_that_is_not_there_is_misuse() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers", "--peer", "unknown"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 2
    assert "unknown" in done.stderr


@pytest.mark.processes
def test_a_program_tells_why_there_is_no_figure_through_any_task_groups(tmp_path: Path) -> None:
    program = (
        "from benchmarks.peers.programs.harness import NoFigure, reporting_failure\n"
        "with reporting_failure():\n"
        "    raise ExceptionGroup('outer', [ExceptionGroup('inner', [NoFigure('not ended within 5 s')])])\n"
    )
    with (
        started(
            [sys.executable, "-c", program], os.environ | {"PYTHONPATH": str(ROOT)}, tmp_path, tmp_path / "log"
        ) as it,
        pytest.raises(Failed, match="not ended within 5 s"),
    ):
        it.line(30)
