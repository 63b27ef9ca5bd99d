"""Access rights of Perdure's Redis users, read from the documentation, so that tests grant what the page says."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

_DOCUMENT = ROOT / "docs" / "how-to" / "security.md"


def documented_rights(namespace: str, user: str = "perdure") -> list[str]:
    """Return the arguments of ACL SETUSER for a namespace. user: a role, or the user with all rights."""
    found = re.search(
        rf"^ACL SETUSER {user} on >PASSWORD (.*?)\n```", _DOCUMENT.read_text("utf-8") + "\n", re.DOTALL | re.M
    )
    assert found is not None
    return found[1].replace("\\\n", " ").replace("perdure", namespace).split()
