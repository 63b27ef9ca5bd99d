"""The outbox for SQLAlchemy: `from perdure.integrations.sqlalchemy import SqlOutbox`."""

from ..worker.integrations.extra import check_package

check_package("perdure.integrations.sqlalchemy", "sqlalchemy", extra="sqlalchemy")

from ..worker.integrations.sqlalchemy import SqlOutbox  # noqa: E402 - after the check

__all__ = ["SqlOutbox"]
