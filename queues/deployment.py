"""What tells one deployment from every other: an id that its Redis keeps.

Two servers can have the same namespace. What belongs to a deployment and is kept outside Redis goes by this id, so that
none takes another's for its own.
"""

from __future__ import annotations

import uuid

from .gateway import Gateway
from .keys import Namespace

__all__ = ["deployment_id"]


async def deployment_id(gateway: Gateway, namespace: Namespace) -> str:
    """The id: 32 hexadecimal digits, made when it is first asked for. Of several that ask at once, all get the same."""
    key = namespace.deployment
    made: tuple[str | bytes, ...] = ("HSETNX", key, "id", uuid.uuid4().hex)
    _, found = await gateway.pipeline([made, ("HGET", key, "id")])
    return str(found.decode())
