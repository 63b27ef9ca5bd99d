"""Only `python -m tests.adapters` collects the tests of adapters: it makes the environments that they need."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "PERDURE_ADAPTER_SOURCES" in os.environ else ["*"]
