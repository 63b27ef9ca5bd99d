"""Tests of the outbox for SQLAlchemy, on SQLite and on PostgreSQL."""
