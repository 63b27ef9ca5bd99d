"""Schedules: tasks that are enqueued at planned times.

definition.py: `Cron`, `Every`, and the planned times of both. call.py: the task of a schedule, as it is stored, and its
messages. store.py: reading, publishing by workers, changes by operators. views.py: schedules as operators see them.
firing.py: the firing of planned times by workers.
"""
