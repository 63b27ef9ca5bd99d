"""Rule of budgets: a charge that was confirmed counts, unless Redis has lost it, and each counts once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ...journal import Line
from ..history import History, Violation

__all__ = ["check_spending"]


def check_spending(history: History) -> Iterator[Violation]:
    """Check the rule. A charge that a worker began and did not confirm may count or not."""
    begun: dict[str, list[Line]] = defaultdict(list)
    confirmed: dict[str, list[Line]] = defaultdict(list)
    spent: dict[str, int] = {}
    for line in history.lines:
        if line.what == "buys":
            begun[line["tenant"]].append(line)
        elif line.what == "bought":
            confirmed[line["tenant"]].append(line)
        elif line.what == "purse":
            spent[line["tenant"]] = line["spent"]
    if not any(line.what == "ends" for line in history.lines):
        return
    for tenant in sorted(begun.keys() | spent.keys()):
        stored, lines = spent.get(tenant, 0), begun[tenant]
        kept = [line for line in confirmed[tenant] if not history.lost(line.at, history.end)]
        if stored > len(lines):
            what = f"{len(lines)} charges were begun for {tenant}, and {stored} count"
            yield Violation("charged twice", what, tuple(lines[-3:]))
        if stored < len(kept):
            what = f"{len(kept)} charges were confirmed for {tenant}, and {stored} count"
            yield Violation("charge lost", what, tuple(kept[-3:]))
