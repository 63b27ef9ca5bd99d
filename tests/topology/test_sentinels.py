"""The sentinels that the tests start: failover."""

from __future__ import annotations

import pytest

from tests.support.servers import BUNDLED, find_program
from tests.support.servers.sentinels import private_sentinels

pytestmark = [pytest.mark.cluster, pytest.mark.integration]


def test_sentinels_name_another_primary_after_a_kill() -> None:
    program = find_program(BUNDLED)
    assert program is not None
    with private_sentinels(program) as sentinels:
        sentinels.primary.command("SET", "key", "value")
        assert sentinels.primary.command("WAIT", 2, 20_000) == 2
        victim = sentinels.kill_primary()
        heir = sentinels.failed_over(victim)
        assert heir is not victim
        assert heir.command("GET", "key") == b"value"
    assert not any(node.alive for node in [*sentinels.servers, *sentinels.watchers])
