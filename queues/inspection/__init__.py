"""Read-only views: queues in numbers, lists of tasks, saved fields of checkpoints.

views.py      queues in numbers; tasks and checkpoints by SCAN
observed.py   workers beside what they hold
running.py    running tasks, from the pending lists
timeline.py   the tasks of all partitions by time, page by page
damaged.py    records of lists that cannot be read
junk_items.py  items of other programs that workers moved away
"""

from __future__ import annotations

from .observed import observed_workers
from .running import running_tasks
from .timeline import TaskFilter, TaskPage, page_tasks, trim_timeline
from .views import (
    QueueStats,
    checkpoint_fields,
    checkpoint_fields_of_all,
    find_task,
    find_tasks,
    linked_objects,
    list_queues,
    list_tasks,
    partition_stats,
    queue_partitions,
    resumable_tasks,
    task_logs,
)

__all__ = [
    "QueueStats",
    "TaskFilter",
    "TaskPage",
    "checkpoint_fields",
    "checkpoint_fields_of_all",
    "find_task",
    "find_tasks",
    "linked_objects",
    "list_queues",
    "list_tasks",
    "observed_workers",
    "page_tasks",
    "partition_stats",
    "queue_partitions",
    "resumable_tasks",
    "running_tasks",
    "task_logs",
    "trim_timeline",
]
