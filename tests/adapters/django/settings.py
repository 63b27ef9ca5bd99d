"""Settings of Django for the tests of the adapter. SHOP_DATABASE names the file of the database."""

from __future__ import annotations

import os

SECRET_KEY = "of the tests only"
USE_TZ = True
INSTALLED_APPS = ["perdure.integrations.django.PerdureConfig"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("SHOP_DATABASE", ":memory:"),
        "OPTIONS": {"timeout": 20, "transaction_mode": "IMMEDIATE"},
    }
}
TASKS = {
    "default": {
        "BACKEND": "perdure.integrations.django.PerdureBackend",
        "QUEUES": ["default", "mail"],
        "OPTIONS": {"app": "tests.adapters.django.shop.app"},
    }
}
