"""Traces with OpenTelemetry, by the public middleware list. Only the package `opentelemetry-api` is imported.

tracing.py      the middleware: spans of enqueueing, runs and steps, and the links between the runs of a task
run_trace.py    the spans of one run
guard.py        no failure of tracing reaches a task
conventions.py  the names of attributes, with the version of the conventions that they are from
"""
