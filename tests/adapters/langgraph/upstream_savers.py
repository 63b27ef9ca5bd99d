"""Fixtures for the tests of LangGraph's engine, in place of those of its conftest: their saver is one of Perdure."""

import itertools
import os
import types
import uuid

import perdure
import pytest
from perdure.integrations.langgraph import PerdureSaver
from perdure.queues.store import entries

entries.uuid = types.SimpleNamespace(uuid4=uuid.uuid4)  # tests replace uuid.uuid4 to count the ids of messages
app = perdure.App("upstream")
numbers = itertools.count()


def new_saver():
    return PerdureSaver(app, name=f"threads-{os.getpid()}-{next(numbers)}")


@pytest.fixture(params=["perdure"])
def sync_checkpointer(request):
    return new_saver()


@pytest.fixture(params=["perdure"])
async def async_checkpointer(request):
    async with app:
        yield new_saver()
