"""Entry point of `python -m perdure.worker.cli`."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from threading import Thread, get_native_id
from typing import Final

from . import main
from .lazy import load

_SPARE: Final = "spare:"
"""Start of PERDURE_SUPERVISED in a spare; see `worker.runtime.supervisor_link`."""

_LOWEST: Final = 19
"""Nice value of a thread that runs when no other needs the processor."""


def import_in_background() -> None:
    """Import what a spare needs in a thread of the lowest priority, and wait for it.

    The workers beside it need the processors. The priority is that of the thread: a process may not raise its own again
    when it becomes a worker. The app is imported later, in the main thread: threads that it starts keep their priority.
    """
    importing = Thread(target=_import, name="perdure import")
    importing.start()
    importing.join()


def _import() -> None:
    with suppress(OSError):  # a sandbox may forbid it
        os.setpriority(os.PRIO_PROCESS, get_native_id(), _LOWEST)
    with suppress(Exception):  # the main thread imports it again, and raises
        load(".worker:run")
        load(".support.worker_process:run_worker")


if __name__ == "__main__":
    if sys.platform == "linux" and os.environ.get("PERDURE_SUPERVISED", "").startswith(_SPARE):
        import_in_background()
    main()
