"""Rows of the outbox."""

from __future__ import annotations


def left() -> int:
    """Return the number of rows that are not sent."""
    from perdure.worker.integrations.django.models import OutboxTask

    return int(OutboxTask.objects.count())
