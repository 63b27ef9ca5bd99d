"""Health of a worker: loop watchdog, deadlines, report and probe server."""
