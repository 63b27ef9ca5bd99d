"""`perdure demo`: recovery from killed workers and a replayed dead letter, shown on real files."""
