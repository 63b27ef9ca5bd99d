"""The Redis users and the table of rights on the security page, made from the roles and from the acts that tests try.

`python -m tests.project.rights_page` writes both into docs/how-to/security.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from perdure.queues.transport.rights import EVERYTHING, ROLES, AclRole

from tests.support.paths import ROOT
from tests.support.rights import ACTS, NAMES, NOT_IN_6_2

__all__ = ["PAGE", "rights_page"]

PAGE: Final = ROOT / "docs" / "how-to" / "security.md"

_WIDTH: Final = 118


def rights_page(page: str) -> str:
    """Return the page with its users and its table written again."""
    for role in (*ROLES, EVERYTHING):
        block = re.compile(rf"^ACL SETUSER {role.name} on >PASSWORD .*?(?=\n```)", re.DOTALL | re.M)
        assert block.search(page) is not None, role.name
        page = block.sub(lambda _, role=role: _user(role), page)  # type: ignore[misc]
    table = re.compile(
        r"(?<=<!-- rights: python -m tests\.project\.rights_page -->\n).*?(?=<!-- end of rights -->)", re.DOTALL
    )
    assert table.search(page) is not None
    return table.sub(lambda _: _table(), page)


def _user(role: AclRole) -> str:
    """Return the command that creates the user of a role."""
    lines = [f"ACL SETUSER {role.name} on >PASSWORD"]
    for rule in role.rules():
        new = len(lines) == 1 or len(lines[-1]) + 1 + len(rule) > _WIDTH - 2 or rule == "-@all"
        if new:
            lines.append(f"  {rule}")
        else:
            lines[-1] += f" {rule}"
    return " \\\n".join(lines)


def _table() -> str:
    rows = [_row(["", *NAMES]), _row(["---"] * (1 + len(NAMES)))]
    rows += [
        _row([act.text, *(_cell(act.allows(name, "7"), act.allows(name, "6.2")) for name in NAMES)]) for act in ACTS
    ]
    return "\n".join([*rows, "", f"\\* {NOT_IN_6_2}.", ""])


def _cell(allowed: bool, on_6_2: bool) -> str:
    return "yes" if allowed else "no \\*" if on_6_2 else "no"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |" if cells[0] != "---" else f"|{'|'.join(cells)}|"


if __name__ == "__main__":
    PAGE.write_text(rights_page(PAGE.read_text("utf-8")), "utf-8")
