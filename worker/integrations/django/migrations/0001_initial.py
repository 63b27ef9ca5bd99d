"""Create the table of the outbox."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    dependencies: ClassVar[list[tuple[str, str]]] = []
    operations: ClassVar = [
        migrations.CreateModel(
            name="OutboxTask",
            fields=[
                ("number", models.BigAutoField(primary_key=True, serialize=False)),
                ("task_id", models.CharField(db_index=True, max_length=128)),
                ("app", models.CharField(max_length=64)),
                ("queue", models.CharField(max_length=256)),
                ("body", models.BinaryField()),
                ("claim_at", models.FloatField(default=0.0, null=True)),
                ("claimed_by", models.CharField(default=None, max_length=32, null=True)),
                ("tries", models.IntegerField(default=0)),
                ("error", models.TextField(default=None, null=True)),
            ],
            options={
                "db_table": "perdure_outbox",
                "indexes": [models.Index(fields=["claim_at"], name="perdure_outbox_claim_at")],
            },
        ),
    ]
