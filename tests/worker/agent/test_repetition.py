"""Repetition: calls and sentences that are the same but for white space, case and numbering, and loops of calls."""

from __future__ import annotations

import pytest
from perdure import Coherence
from perdure.worker.agent.coherence.checks import Call, View, normal_form, run_checks


def found(coherence: Coherence | None = None, calls: list[Call] | None = None, said: list[str] | None = None) -> str:
    view = View({"goal": "g"}, "g", calls or (), [Call.said(one) for one in said or ()])
    return "; ".join(one.detail for one in run_checks(view, coherence or Coherence()) if one.check == "repetition")


def about(calls: list[Call]) -> str:
    return next(one.about for one in run_checks(View({"goal": "g"}, "g", calls), Coherence()))


def named(names: str) -> list[Call]:
    return [Call.of(name, {"q": name}) for name in names]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("read  the\nfile", "Read the file "),
        ("1. read the file", "2) read the file"),
        ("step 3: read", "Step 4: read"),
        ("ask again (attempt 1 of 5)", "ask again (attempt 2 of 5)"),
        ("the answer #1", "the answer #12"),
        ("the answer (1)", "the answer (2)"),
    ],
)
def test_texts_that_differ_in_form_only_are_the_same(one: str, other: str) -> None:
    assert normal_form(one) == normal_form(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("page 3", "page 4"), ("3", "4"), ("2026-01-01", "2026-01-02"), ("do it", "do not"), ("v1.2", "v1.3")],
)
def test_numbers_that_mean_something_differ(one: str, other: str) -> None:
    assert normal_form(one) != normal_form(other)


def test_calls_in_another_form_are_repeated() -> None:
    calls = [Call.of("search", {"q": f"{number}. find   THE file"[: 30 + number], "n": 7}) for number in range(1, 6)]
    assert found(calls=calls) == 'search({"n":7,"q":"5. find   THE file"}) was called 5 times in the last 5 calls'
    assert about(calls) == about([*calls, *calls[:2]])  # one finding for as long as it holds
    assert found(calls=[Call.of("search", {"q": "file", "page": number}) for number in range(20)]) == ""


def test_sentences_in_another_form_are_repeated() -> None:
    said = [f"Attempt {number}: let me  look again" for number in range(5)]
    assert found(said=said) == "'Attempt 4: let me look again' was said 5 times in the last 5 messages"
    assert found(said=[f"I read page {number}" for number in range(20)]) == ""


@pytest.mark.parametrize("cycle", ["ab", "abc", "abcd", "abcde", "aab"])
def test_a_loop_of_two_to_five_calls_is_found(cycle: str) -> None:
    text = found(calls=named("xyz" + cycle * 3))
    assert text.endswith("followed each other 3 times")
    assert text.count("(") == len(cycle)
    assert about(named(cycle * 3)) == about(named(cycle * 3 + cycle[0]))  # it is the same loop one call later
    assert found(calls=named(cycle * 2)) == ""
    assert found(Coherence(loops=2), calls=named(cycle * 2))


def test_longer_loops_and_loops_that_ended_are_no_findings() -> None:
    assert found(Coherence(repeats=20), calls=named("abcdef" * 3)) == ""
    assert found(Coherence(repeats=20), calls=named("ababab" + "xyz")) == ""
    assert found(calls=named("aaaa")) == ""


def test_sentences_loop_too() -> None:
    assert found(said=["I ask.", "I wait."] * 3) == "'I ask.', 'I wait.' followed each other 3 times"
