"""Django: a backend for django.tasks, and an outbox. It is an app of Django, for the table of the outbox.

backend.py     tasks of django.tasks that a worker of Perdure runs
outbox.py      the outbox, in the transactions of Django
models.py      its table
config.py      the entry of INSTALLED_APPS
"""
