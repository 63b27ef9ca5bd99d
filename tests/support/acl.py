"""The rights that the documentation gives to Perdure's user: what it says is what the tests grant."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

_DOCUMENT = ROOT / "docs" / "how-to" / "security.md"


def documented_rights(namespace: str, user: str = "perdure") -> list[str]:
    """As arguments of ACL SETUSER, for this namespace. user: a role, or the one for everything."""
    found = re.search(
        rf"^ACL SETUSER {user} on >PASSWORD (.*?)\n```", _DOCUMENT.read_text("utf-8") + "\n", re.DOTALL | re.M
    )
    assert found is not None
    return found[1].replace("\\\n", " ").replace("perdure", namespace).split()
