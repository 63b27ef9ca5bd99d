"""Programs that run in the virtual environment of a setup: handlers, clients and the shared file of times.

The modules named `on_...` import their project, which is installed only there. The others use the standard library.
"""
