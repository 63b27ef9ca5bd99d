"""Artifacts: bytes that tasks produce, stored outside Redis under the hash of their content.

The package knows nothing of steps, events and agents; `ctx.artifacts` is in worker/durable/task_artifacts.py.

    store.py         ArtifactStore: save, read and remove by hash; artifact names; opening a store
    backend.py       protocol of a backend, layout of the objects
    local.py         backend in a folder
    object_store.py  backend in any file system of fsspec
    chunks.py        input data as a stream of chunks
    deployment.py    the store of a deployment, also for values that are too large for Redis
    links.py         links from tasks to artifacts; orphans

Bytes are stored first and linked in the checkpoint afterwards, so a crash leaves bytes without a link and never a link
without bytes. The collector removes unlinked bytes after a grace; saving the same bytes again renews that grace.
"""

from .chunks import Data
from .deployment import artifact_store, keep_large_values
from .links import ArtifactLink, all_links, field_of, orphans, task_links
from .store import ArtifactStore, check_artifact_name, open_store

__all__ = [
    "ArtifactLink",
    "ArtifactStore",
    "Data",
    "all_links",
    "artifact_store",
    "check_artifact_name",
    "field_of",
    "keep_large_values",
    "open_store",
    "orphans",
    "task_links",
]
