"""Access rights of Perdure's Redis users, read from the documentation, so that tests grant what the page says."""

from __future__ import annotations

import re
from contextlib import suppress

import redis

from tests.support.paths import ROOT
from tests.support.servers.nodes import Node

__all__ = ["create_user", "documented_rights"]

_DOCUMENT = ROOT / "docs" / "how-to" / "security.md"


def documented_rights(namespace: str, user: str = "perdure", *, version: str = "7") -> list[str]:
    """Return the arguments of ACL SETUSER for a namespace.

    Args:
        user: a role, or the user with all rights.
        version: that of the server. Redis 6.2 has no rights to read keys only: the page says to write `~` there.
    """
    found = re.search(
        rf"^ACL SETUSER {user} on >PASSWORD (.*?)\n```", _DOCUMENT.read_text("utf-8") + "\n", re.DOTALL | re.M
    )
    assert found is not None
    rights = found[1].replace("\\\n", " ").replace("{perdure", f"{{{namespace}").split()
    return [right.replace("%R~", "~") if version.startswith("6.") else right for right in rights]


def create_user(node: Node, role: str, namespace: str) -> None:
    """Create the user of a role, of this name and with the password `of-ROLE`."""
    version = str(node.info("server")["redis_version"])
    rights = documented_rights(namespace, role, version=version)
    node.command("ACL", "SETUSER", role, "reset", "on", f">of-{role}", *rights)
    with suppress(redis.exceptions.ResponseError):  # Redis 7.0 does not know it
        node.command("ACL", "SETUSER", role, "+client|setinfo")
