"""What tasks produce and keep outside Redis: bytes under their own hash. Knows nothing of steps, events and agents."""

from .chunks import Data
from .links import ArtifactLink, all_links, field_of, orphans, task_links
from .store import ArtifactStore, check_artifact_name, open_store

__all__ = [
    "ArtifactLink",
    "ArtifactStore",
    "Data",
    "all_links",
    "check_artifact_name",
    "field_of",
    "open_store",
    "orphans",
    "task_links",
]
