"""Fixed releases: which release a server must be upgraded to."""

from __future__ import annotations

import pytest
from perdure.queues.transport.releases import FIXED_RELEASES, Condition, FixedRelease, missing_fixes, parse_version

DEFECT = FixedRelease("X", "it loses data", {"Redis": ((6, 2, 20), (7, 2, 11), (8, 0, 4))}, "https://example.org")


@pytest.mark.parametrize(
    ("kind", "version", "fixed"),
    [
        ("Redis", (7, 2, 10), (7, 2, 11)),
        ("Redis", (7, 2, 11), None),
        ("Redis", (7, 2, 12), None),
        ("Redis", (7, 0, 15), (7, 2, 11)),  # its branch has no fixed release
        ("Redis", (8, 2, 0), None),  # a later branch than any with the defect
        ("Valkey", (7, 2, 4), None),
    ],
)
def test_the_release_to_upgrade_to(
    kind: str, version: tuple[int, int, int], fixed: tuple[int, int, int] | None
) -> None:
    assert DEFECT.first_fixed(kind, version) == fixed


def test_a_branch_is_not_judged_by_a_source_about_others() -> None:
    one = FixedRelease("X", "", {"Valkey": ((9, 1, 4),)}, "https://example.org", branches_only=True)
    assert one.first_fixed("Valkey", (9, 0, 1)) is None
    assert one.first_fixed("Valkey", (9, 1, 3)) == (9, 1, 4)


USES_TLS: list[Condition] = ["tls"]


def test_a_defect_of_a_feature_concerns_servers_that_use_it() -> None:
    assert "CVE-2026-81934" not in {one.name for one, _ in missing_fixes("Redis", (8, 6, 5), ())}
    assert "CVE-2026-81934" in {one.name for one, _ in missing_fixes("Redis", (8, 6, 5), USES_TLS)}


def test_the_table_is_sound() -> None:
    assert len({one.name for one in FIXED_RELEASES}) == len(FIXED_RELEASES)
    for one in FIXED_RELEASES:
        assert one.source.startswith("https://")
        for releases in one.fixed.values():
            assert list(releases) == sorted(releases)
            assert len({release[:2] for release in releases}) == len(releases)


@pytest.mark.parametrize(("text", "version"), [("7.2.4", (7, 2, 4)), ("255.255.255", (255, 255, 255)), ("7.x", None)])
def test_a_version_is_three_numbers(text: str, version: tuple[int, int, int] | None) -> None:
    assert parse_version(text) == version
