"""The chaos suite (docs/how-to/chaos.md): a run under faults, journalled outside Redis, and its checker."""
