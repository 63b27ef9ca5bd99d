"""The chaos suite (tests/chaos/README.md): a run under faults, journalled outside Redis, and its checker."""
