"""Artifacts: bytes that tasks produce, stored outside Redis under the hash of their content.

The package knows nothing of steps, events and agents; `ctx.artifacts` is in worker/artifacts/task_artifacts.py.

    store.py         ArtifactStore: save, read and remove by hash; artifact names; opening a store
    backend.py       protocol of a backend, layout of the objects
    local.py         backend in a folder
    object_store.py  backend in any file system of fsspec
    links.py         links from tasks to artifacts; orphans

Bytes are stored first and linked in the checkpoint afterwards, so a crash leaves bytes without a link and never a link
without bytes. The collector removes unlinked bytes after a grace; saving the same bytes again renews that grace.
"""
