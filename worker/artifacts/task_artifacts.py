"""Artifacts of the running task: `ctx.artifacts`.

The bytes are stored first and linked in the checkpoint afterwards, once. A run that dies in between leaves unlinked
bytes, which the collector removes. A run that dies after the link has nothing to repeat: the next run gets the link.
"""

from __future__ import annotations

import mimetypes
from collections.abc import AsyncIterator
from pathlib import Path

from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.inspection.views import checkpoint_fields
from ...queues.transport.backoff import retry_while_unavailable
from ..agents.journal.agent_events import ArtifactSaved
from ..agents.journal.state import Artifact
from ..durable.journal.step_record import StepRecord
from ..durable.run import Run
from ..durable.steps.current import Durability, Step, check_call, step_here
from ..errors import ArtifactError
from ..log import log_wait
from .backend import Data
from .links import ArtifactLink, field_of, links_among
from .store import ArtifactStore, artifact_store, check_artifact_name


class Artifacts:
    """Artifacts of the running task."""

    def __init__(self, run: Run, durability: Durability) -> None:
        self._run = run
        self._durability: Durability = durability

    async def save(self, name: str, data: Data, media_type: str | None = None) -> Artifact:
        """Store bytes under a name and link them in the checkpoint. The last artifact of a name replaces earlier ones.

        In the handler, the call is recorded once: a resumed run returns the recorded artifact and ignores `data`.
        Within a step it is part of the step and repeated with it. In a sync step, call
        `anyio.from_thread.run(ctx.artifacts.save, name, data)`.

        Args:
            data: Bytes, text, a `Path`, a binary file, or an async iterator of bytes; large data is streamed.
            media_type: Guessed from the name if omitted.

        Raises:
            BadArtifactName, ArtifactTooLarge, ArtifactDamaged, StoreUnavailable, StepOutsideTask, LeaseLost
            ArtifactError: The data cannot be read.
        """
        run = self._run
        check_artifact_name(name)
        await check_call(run, f"artifacts.save({name!r})", own=True, within=True)
        step = step_here()
        key = None
        if step is None:
            key = run.keys.next(f"#artifact_saved:{name}")
            if (recorded := await run.history.read_record(key)) is not None:
                return _artifact(ArtifactLink.decode(run.id, name, StepRecord.decode(recorded).result))
            if run.stopping:
                await run.boundary()
            run.step_began(key)  # a stopping worker waits for it
        try:
            stored = await (await self._store()).save(self._what(name), data, run.touch)
            kind = media_type or mimetypes.guess_type(name)[0] or _default_type(data)
            link = ArtifactLink(name=name, hash=stored.hash, size=stored.size, media_type=kind)
            await self._link(link, key, step)
        finally:
            if key is not None:
                run.step_ended(key)
        return _artifact(link)

    async def _link(self, link: ArtifactLink, key: str | None, step: Step | None) -> None:
        run, field = self._run, field_of(link.name)
        if key is None:
            await run.history.read_unfinished(field)
            if (linked := run.history.saved.get(field)) is not None:
                former = ArtifactLink.decode(run.id, link.name, linked)
                if former == link.model_copy(update={"n": former.n}):
                    return  # linked by an earlier try of this step
        where = step.key if step is not None else run.keys.within
        event = run.next_entry(
            ArtifactSaved(name=link.name, hash=link.hash, size=link.size, media_type=link.media_type, step=where)
        )
        data = link.model_copy(update={"n": int(event.value)}).encode()
        entries = [Entry(Kind.SAVED, field, data), event]
        if key is not None:
            entries.insert(0, Entry(Kind.DONE_WITH_EVENT, key, StepRecord(data).encode()))
        run.history.saved[field] = data
        await run.recorder.put(*entries, wait=self._durability != "async", replicated=self._durability == "replicated")

    async def list(self) -> list[Artifact]:
        """Return the task's artifacts, the latest of each name, in the order in which they were saved."""
        run = self._run
        saved = run.history.saved
        if run.history.pages is not None:
            saved = await checkpoint_fields(run.gateway, run.delivery.partition, run.id, field_of("")) | saved
        return [_artifact(link) for link in links_among(run.id, saved)]

    async def read(self, artifact: str | Artifact) -> bytes:
        """Return the bytes, verified by their hash.

        Args:
            artifact: Name, or what `save` returned, in this task or another one.

        Raises:
            ArtifactMissing, ArtifactDamaged, StoreUnavailable
            ArtifactError: The task has no artifact of this name.
        """
        found = await self._find(artifact)
        return await (await self._store()).read(self._what(found.name), found.hash, found.size)

    async def chunks(self, artifact: str | Artifact) -> AsyncIterator[bytes]:
        """Yield the bytes in chunks. The hash is verified after the last one. Raises as `read` does."""
        found = await self._find(artifact)
        async for chunk in (await self._store()).chunks(self._what(found.name), found.hash, found.size):
            yield chunk

    async def fetch(self, artifact: str | Artifact, to: Path) -> None:
        """Write the verified bytes to a file, which is replaced atomically. Raises as `read` does."""
        found = await self._find(artifact)
        await (await self._store()).fetch(self._what(found.name), found.hash, found.size, to)

    async def path(self, artifact: str | Artifact) -> Path:
        """Return the file in the store, for reading only; if the store is not a local folder, use `fetch`.

        Raises as `read` does.
        """
        found = await self._find(artifact)
        return await (await self._store()).path(self._what(found.name), found.hash, found.size)

    async def _find(self, artifact: str | Artifact) -> Artifact:
        if isinstance(artifact, Artifact):
            return artifact
        await self._run.history.read_unfinished(field_of(artifact))
        data = self._run.history.saved.get(field_of(artifact))
        if data is None:
            names = ", ".join(repr(one.name) for one in await self.list()) or "none"
            raise ArtifactError(f"task {self._run.id} has no artifact {artifact!r}; its artifacts: {names}")
        return _artifact(ArtifactLink.decode(self._run.id, artifact, data))

    def _what(self, name: str) -> str:
        return f"artifact {name!r} of task {self._run.id}"

    async def _store(self) -> ArtifactStore:
        run = self._run
        return await retry_while_unavailable(
            lambda: artifact_store(run.gateway, run.settings),
            on_wait=log_wait(f"artifacts of task {run.id}", run.touch),
        )


def _artifact(link: ArtifactLink) -> Artifact:
    return Artifact(name=link.name, hash=link.hash, size=link.size, media_type=link.media_type)


def _default_type(data: Data) -> str:
    return "text/plain" if isinstance(data, str) else "application/octet-stream"
