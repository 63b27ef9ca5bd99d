"""The guards that sensitivity leaves out, conditions that refuse or protect, and the table of what it found."""

from __future__ import annotations

from collections import Counter
from importlib import import_module

from perdure.queues.transport.scripts import loaded_scripts

from .guards import ROOT, Guard, Kind
from .module_guards import guards_of_modules
from .removal import parts_of
from .script_guards import guards_of_scripts, rewritten
from .table import FINDINGS, rows


def texts(guards: list[Guard], path: str) -> list[str]:
    return [guard.text for guard in guards if guard.path == path]


def test_guards_of_scripts_are_conditions_that_refuse_or_protect() -> None:
    guards = guards_of_scripts()
    assert texts(guards, "queues/lua/reschedule.lua") == [
        "not owned(KEYS[1])",
        "settled(KEYS[2])",
        "lost",
        "ARGV[11] == 'returned' or redis.call('HEXISTS', KEYS[6], 'cancel') == 0",
        "ARGV[13]",
    ]
    assert "tostring(pending[4]) == ARGV[4]" in texts(guards, "queues/lua/fence.lua")
    assert len({str(guard) for guard in guards}) == len(guards)


def test_guards_of_modules_are_conditions_and_awaits() -> None:
    guards = guards_of_modules()
    slots = texts(guards, "worker/runtime/slots.py")
    assert "task in self._busy" in slots
    assert "not self.free" in slots
    assert "await self.wait_empty()" in slots
    assert not any("error := task.exception()" in text for text in slots), "it decides what is logged"
    assert len({str(guard) for guard in guards}) == len(guards)


def test_a_script_without_changes_stays_as_it_is() -> None:
    seen = []

    def keep(guard: Guard, wanted: str) -> str:
        seen.append((guard.line, wanted))
        return guard.text

    changed = rewritten("queues/lua/park.lua", keep)
    assert "if not owned(KEYS[1]) then\n  return settled(KEYS[2]) and 1 or 0\nend\n" in changed
    assert [wanted for _, wanted in seen] == ["true", "true", "false", "true", "false", "false"]
    assert "if false then" in rewritten("queues/lua/park.lua", lambda guard, wanted: wanted)


def test_a_guard_is_taken_out_of_the_scripts_of_every_release() -> None:
    """Those of later releases differ in the comment at the start of each file."""
    for module in ("perdure.worker.runtime.worker", "perdure.queues.waits"):  # which load them all
        import_module(module)
    for path in {guard.path for guard in guards_of_scripts()}:
        for part in parts_of((ROOT / path).read_text()):
            assert b"-- KEYS" not in part, path
            assert any(part in script.source.encode() for script in loaded_scripts()), path


def test_each_row_of_the_table_is_about_one_guard_of_the_present_code() -> None:
    guards = Counter((guard.place, guard.text) for guard in (*guards_of_scripts(), *guards_of_modules()))
    assert set(guards.values()) == {1}
    assert {(one.place, one.text) for one in FINDINGS} <= guards.keys()
    assert len({(one.place, one.text) for one in FINDINGS}) == len(FINDINGS)


def test_a_guard_has_a_seed_or_a_reason() -> None:
    for one in FINDINGS:
        assert (one.kind is Kind.FOUND) == (one.seed is not None), one
        assert one.result, one


def test_the_page_has_the_table() -> None:
    """`python -m tests.simulation.sensitivity --table` prints it."""
    page = (ROOT / "tests/simulation/README.md").read_text()
    assert "\n\n" + "\n".join(rows()) + "\n\n" in page
