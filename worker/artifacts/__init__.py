"""What tasks produce and keep outside Redis: bytes under their own hash. Knows nothing of steps, events and agents."""

from .collection import orphans
from .links import Link, all_links, field_of, task_links
from .names import check_artifact_name
from .opening import open_store
from .source import Data
from .store import ArtifactStore

__all__ = [
    "ArtifactStore",
    "Data",
    "Link",
    "all_links",
    "check_artifact_name",
    "field_of",
    "open_store",
    "orphans",
    "task_links",
]
