"""The SQLite memory backend."""
