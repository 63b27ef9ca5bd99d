"""The table of the outbox."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class OutboxTask(models.Model):
    """A task that a transaction has enqueued, and that no relay has sent yet.

    claim_at: time from which a relay may claim it, in seconds since the epoch; None for a task that cannot be sent, and
    whose error says why.
    """

    number = models.BigAutoField(primary_key=True)
    task_id = models.CharField(max_length=128, db_index=True)
    app = models.CharField(max_length=64)
    queue = models.CharField(max_length=256)
    body = models.BinaryField()
    claim_at = models.FloatField(null=True, default=0.0)
    claimed_by = models.CharField(max_length=32, null=True, default=None)
    tries = models.IntegerField(default=0)
    error = models.TextField(null=True, default=None)

    class Meta:
        app_label = "perdure"
        db_table = "perdure_outbox"
        indexes: ClassVar = [models.Index(fields=["claim_at"], name="perdure_outbox_claim_at")]

    def __str__(self) -> str:
        return str(self.task_id)
