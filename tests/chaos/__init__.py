"""The chaos suite: a run under faults, journalled outside of Redis, and a checker of the journal. See docs/chaos.md."""
