"""Django: a backend for django.tasks, and an outbox."""

from ..worker.integrations.extra import check_package

check_package("perdure.integrations.django", "django", extra="django")

from ..worker.integrations.django.backend import PerdureBackend, worker_app  # noqa: E402 - after the check
from ..worker.integrations.django.config import PerdureConfig  # noqa: E402
from ..worker.integrations.django.outbox import DjangoOutbox  # noqa: E402

__all__ = ["DjangoOutbox", "PerdureBackend", "PerdureConfig", "worker_app"]
