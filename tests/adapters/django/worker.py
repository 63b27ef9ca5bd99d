"""The module of the worker processes: `perdure worker run tests.adapters.django.worker:app`."""

from __future__ import annotations

from perdure.integrations.django import worker_app

app = worker_app()
