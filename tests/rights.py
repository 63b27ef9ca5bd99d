"""The rights that the documentation gives to Perdure's user: what it says is what the tests grant."""

from __future__ import annotations

import re
from pathlib import Path

_DOCUMENT = Path(__file__).parent.parent / "docs" / "cluster.md"


def documented_rights(namespace: str) -> list[str]:
    """As arguments of ACL SETUSER, for this namespace."""
    found = re.search(r"^    ACL SETUSER worker on >PASSWORD (.*?)\n\n", _DOCUMENT.read_text("utf-8"), re.DOTALL | re.M)
    assert found is not None
    return found[1].replace("\\\n", " ").replace("perdure", namespace).split()
