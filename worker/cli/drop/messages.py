"""Messages of a drop folder: `DIR/agents/AGENT/SESSION/NAME.txt` has the text of one, `NAME.json` also more fields:

    {"text": "Where is my parcel?", "sender": "shop", "inputs": {"customer": 42}, "app": "shop", "queue": "shop",
     "id": "parcel-42", "skip_failed": false}

Only `text` is required. The id of a message without one is the digest of its file.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ....queues.catalog import Catalog, read_catalog
from ....queues.errors import CatalogError
from ....queues.keys import check_name
from ....queues.producer import Producer
from ...session import SentMessage, send_by_catalog
from ..support.errors import Failed
from ..support.options import problem, read_object
from .folder import NothingPublished, TakenFile

ENDS: Final = (".txt", ".json")


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    text: str
    sender: str = ""
    inputs: dict[str, Any] | None = None
    app: Annotated[str, AfterValidator(lambda name: check_name("app", name))] | None = None
    queue: Annotated[str, AfterValidator(lambda name: check_name("queue", name))] | None = None
    id: Annotated[str, Field(min_length=1)] | None = None
    skip_failed: bool = False


async def send(producer: Producer, file: TakenFile, agent: str, session_id: str) -> SentMessage:
    """Send the message of a file to a session.

    Raises:
        Failed, ValueError: The file is not valid, or the agent is unknown; nothing was sent.
        FileChanged: The file was written to.
        NothingPublished: No worker has published its tasks.
        PerdureError: The session takes no message now, or Redis cannot be used.
    """
    message = _read(file)

    async def sent(catalog: Catalog) -> SentMessage:
        return await send_by_catalog(
            producer,
            agent,
            session_id,
            message.text,
            catalog,
            queue=message.queue,
            app=message.app,
            sender=message.sender,
            message_id=message.id or f"drop-{file.digest}",
            inputs=message.inputs,
            skip_failed=message.skip_failed,
        )

    try:
        return await sent(await producer.catalog())
    except CatalogError:  # the producer's catalog is some seconds old: a worker may have started since
        catalog = await read_catalog(producer.gateway, producer.namespace)
        if not catalog.tasks:
            raise NothingPublished from None
        return await sent(catalog)


def _read(file: TakenFile) -> _Message:
    data = file.read()
    try:
        if file.name.endswith(".txt"):
            return _Message(text=data.decode().rstrip("\n"))
        return _Message.model_validate(read_object(data))
    except UnicodeDecodeError:
        raise Failed("it must be UTF-8") from None
    except ValueError as error:
        raise Failed(problem(error)) from None
