"""The app of Django that has the table of the outbox."""

from __future__ import annotations

from django.apps import AppConfig


class PerdureConfig(AppConfig):
    """The entry of INSTALLED_APPS: `perdure.integrations.django.PerdureConfig`."""

    name = "perdure.worker.integrations.django"
    label = "perdure"
    verbose_name = "Perdure"
    default_auto_field = "django.db.models.BigAutoField"
