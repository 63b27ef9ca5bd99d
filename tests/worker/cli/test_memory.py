"""`perdure memory`: all commands, without Redis."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from perdure.worker.memory import HybridStore

from tests.support.command_line import call, process


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERDURE_REDIS_URL", "redis://localhost:1")  # no server listens there, and none is asked
    path = tmp_path / "memories" / "m.sqlite3"
    monkeypatch.setenv("PERDURE_MEMORY", str(path))
    return path


def add(text: str, *options: str) -> str:
    answer = call("memory", "add", text, *options)
    assert answer.code == 0, answer.err
    [memory_id] = answer.ids
    return memory_id


def test_memories_are_added_found_listed_and_forgotten(place: Path) -> None:
    rule = add("Deploys are frozen on Fridays", "--type", "rule", "--owner", "ops", "--tag", "deploy", "--tag", "ci")
    add("Cats sleep sixteen hours", "--importance", "0.9")
    answer = call("memory", "search", "may I deploy?", "--json")
    [found] = answer.json
    assert found["memory"]["id"] == rule
    assert found["memory"]["tags"] == ["deploy", "ci"]
    assert found["text_rank"] == 1
    table = call("memory", "search", "frozen deploys", "--owner", "ops", "--tag", "ci")
    assert rule in table.out
    assert "Deploys are frozen on Fridays" in table.out
    assert [one["text"] for one in call("memory", "list", "--type", "fact", "--json").json] == [
        "Cats sleep sixteen hours"
    ]
    listed = call("memory", "list", "--limit", "1")
    assert "0.900" in listed.out
    assert "more than 1 memories match" in listed.err
    assert call("memory", "forget", rule, "--owner", "other").code == 1
    gone = call("memory", "forget", rule)
    assert (gone.code, gone.ids) == (0, [rule])
    again = call("memory", "forget", rule)
    assert again.code == 1
    assert f"no memory {rule} in {place}" in again.err


def test_a_duplicate_is_updated_and_a_known_key_stores_nothing() -> None:
    first = call("memory", "add", "The limit is 10", "--key", "k", "--json").json
    second = call("memory", "add", "the LIMIT is 10.")
    assert second.ids == [first["id"]]
    assert "updated in" in second.err
    assert "updated in" in call("memory", "add", "Something else", "--key", "k").err


def test_an_export_can_be_imported_unchanged(place: Path, tmp_path: Path) -> None:
    for number in range(3):
        add(f"memory number {number}", "--owner", "a")
    add("of no user")
    file = tmp_path / "memories.jsonl"
    exported = call("memory", "export", "-o", str(file))
    assert (exported.code, exported.out) == (0, "")
    assert "exported 4 memories" in exported.err
    only = call("memory", "export", "--owner", "a")
    assert [one["text"] for one in only.lines] == [f"memory number {n}" for n in range(3)]
    copy = str(tmp_path / "copy.sqlite3")
    answer = call("memory", "add", "--file", str(file), "--memory", copy, "--json")
    assert answer.json == {"stored": 4, "known": 0}
    assert call("memory", "export", "--memory", copy).out == file.read_text()
    assert call("memory", "add", "--file", "-", "--json", stdin=file.read_bytes()).json == {"stored": 0, "known": 4}
    assert place.exists()


@pytest.mark.parametrize("fails", [False, True])
def test_the_store_is_closed_after_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    add("kept")
    closed: list[HybridStore] = []
    close = HybridStore.close

    async def closing(store: HybridStore) -> None:
        await close(store)
        closed.append(store)

    monkeypatch.setattr(HybridStore, "close", closing)
    output = tmp_path / "missing" / "memories.jsonl" if fails else tmp_path / "memories.jsonl"
    assert call("memory", "export", "-o", str(output)).code == int(fails)
    assert len(closed) == 1


def test_a_file_of_new_memories_is_checked_before_anything_is_stored(place: Path) -> None:
    lines = b'{"text": "one", "owner": "x"}\n\n{"text": "once!"}\n{"text": "One!", "owner": "x", "importance": 1}\n'
    answer = call("memory", "add", "--file", "-", "--type", "note", "--json", stdin=lines)
    assert answer.json == {"stored": 2, "known": 1}
    assert {(one["owner"], one["type"]) for one in call("memory", "list", "--json").json} == {
        ("x", "note"),
        ("", "note"),
    }
    wrong = b'{"text": "new"}\n{"text": ""}\nnonsense\n{"text": "x", "colour": 1}\n{"text": "x", "owner": 1}\n{}\n'
    answer = call("memory", "add", "--file", "-", stdin=wrong)
    assert answer.code == 2
    assert "nothing was stored, 5 of 6 lines are invalid" in answer.err
    for line in ("line 2: text", "line 3: not JSON", "line 4: colour", "line 5: owner and key", "line 6: text"):
        assert line in answer.err
    assert call("memory", "search", "new", "--json").json == []
    assert place.exists()


def test_the_deleted_ids_are_printed_as_json() -> None:
    memory_id = add("to be forgotten")
    planned = call("memory", "forget", memory_id, "--dry-run", "--json")
    assert planned.json == {"forgotten": [memory_id], "dry_run": True}
    done = call("memory", "forget", memory_id, "--json")
    assert done.json == {"forgotten": [memory_id], "dry_run": False}


def test_forget_and_prune_have_a_dry_run() -> None:
    ids = {add(f"memory number {n}", "--owner", "a", "--importance", f"0.{n}") for n in range(1, 4)}
    kept = add("of no user")
    assert set(call("memory", "forget", "--all", "--owner", "a", "--dry-run").ids) == ids
    assert len(call("memory", "prune", "--below", "0.25", "--dry-run").ids) == 2
    pruned = call("memory", "prune", "--keep", "1", "--json").json
    assert (len(pruned["pruned"]), pruned["dry_run"]) == (2, False)
    assert call("memory", "prune", "--older-than", "1d").ids == []
    assert len(call("memory", "forget", "--all", "--owner", "a").ids) == 1
    assert [one["id"] for one in call("memory", "list", "--json").json] == [kept]


def test_reembed_uses_the_current_embedder(monkeypatch: pytest.MonkeyPatch) -> None:
    add("Deploys are frozen")
    monkeypatch.setenv("PERDURE_EMBEDDER", "perdure.memory:HashingEmbedder")
    assert call("memory", "search", "frozen deploys", "--json").json[0]["vector_rank"] is None
    assert "embedded 1 memories" in call("memory", "reembed").err
    assert call("memory", "search", "frozen deploys", "--json").json[0]["vector_rank"] == 1
    monkeypatch.setenv("PERDURE_EMBEDDER", "tests.support.memory_stores:Angles")
    refused = call("memory", "search", "frozen deploys")
    assert refused.code == 1
    assert "with 512 dimensions, but 'angles' with 2" in refused.err
    assert "perdure memory reembed" in refused.err
    assert call("memory", "list").code == 0  # what embeds nothing does not care
    assert call("memory", "reembed", "--json").json == {"embedded": 1}
    assert call("memory", "search", "Deploys", "--json").json[0]["vector_rank"] == 1


def test_a_damaged_file_is_reported_with_the_remedy_and_salvaged(place: Path, tmp_path: Path) -> None:
    lines = "\n".join(json.dumps({"text": f"memory {n}:{' and so on' * 40}"}) for n in range(120))
    assert call("memory", "add", "--file", "-", stdin=lines.encode()).code == 0
    data = bytearray(place.read_bytes())
    start = data.index(b"memory 50:") // 4096 * 4096
    data[start : start + 4096] = b"\xde" * 4096
    place.write_bytes(data)
    broken = call("memory", "export")
    assert broken.code == 1
    assert f"memory store {place} is damaged" in broken.err
    assert "perdure memory export --salvage" in broken.err
    saved = tmp_path / "saved.jsonl"
    answer = call("memory", "export", "--salvage", "-o", str(saved))
    assert answer.code == 1  # not all of it
    assert "unreadable places:" in answer.err
    new = str(tmp_path / "new.sqlite3")
    counts = call("memory", "add", "--file", str(saved), "--memory", new, "--json").json
    assert 100 <= counts["stored"] < 120
    assert bytes(data) == place.read_bytes()


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("search", "x"), 1, "it does not exist; 'perdure memory add' creates it"),
        (("add",), 2, "give a TEXT"),
        (("add", "x", "--file", "-"), 2, "for one memory"),
        (("add", "   "), 1, "text: "),
        (("add", "x", "--importance", "2"), 2, "--importance"),
        (("add", "--file", "/nowhere"), 2, "could not read /nowhere"),
        (("add", "x", "--memory", "/dev/null/x"), 1, "memory store /dev/null/x"),
        (
            ("add", "x", "--memory", "postgresql://u:secret@localhost:1/x"),
            1,
            "postgresql://localhost:1/x: could not be",
        ),
        (("forget",), 2, "give IDs, or --all"),
        (("forget", "--all"), 2, "--all needs"),
        (("forget", "x", "--all", "--owner", "a"), 2, "give IDs, or --all"),
        (("add", "x", "--memory", "mysql://u:secret@h/x"), 2, "postgresql:// URL, got a URL with mysql://"),
        (("prune",), 2, "give --below STRENGTH, --older-than DURATION or --keep N"),
        (
            ("prune", "--older-than", "-1"),
            2,
            "'--older-than': must be a number of seconds, 0 or more",
        ),
        (("export", "--salvage"), 1, "it does not exist"),
        (("export", "--salvage", "--memory", "postgresql:///x"), 2, "for a file"),
        (("reembed",), 1, "it does not exist"),
    ],
)
def test_an_error_is_one_line(args: tuple[str, ...], code: int, says: str) -> None:
    if args[0] in ("prune", "forget"):
        add("x")
    answer = call("memory", *args)
    assert (answer.code, answer.out) == (code, "")
    assert says in answer.err
    warned = "warning: all users of this machine can read the password in --memory" in answer.err
    assert warned is any("secret@" in arg for arg in args)
    assert answer.err.count("\n") == 1 + warned
    assert "Traceback" not in answer.err
    assert "secret" not in answer.err


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nonsense", "module:attribute, got 'nonsense'"),
        ("no.such.module:x", "ModuleNotFoundError"),
        ("json:dumps", "TypeError"),
        ("json:JSONEncoder", "it must have a name"),
    ],
)
def test_an_unusable_embedder_is_misuse(target: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_EMBEDDER", target)
    answer = call("memory", "add", "x")
    assert answer.code == 2
    assert "PERDURE_EMBEDDER" in answer.err
    assert says in answer.err


def test_memory_runs_as_a_process() -> None:
    assert process("memory", "add", "x").ids
