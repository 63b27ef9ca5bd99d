"""The measured projects: in each `on_...` module a project's worker and client, with the handlers that all share.

A project is installed only in the virtual environment of its setup.
"""
