"""Adapters are tested in environments of their own, which `python -m tests.adapters` makes; nothing else collects them."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "PERDURE_ADAPTER_SOURCES" in os.environ else ["*"]
