"""Read-only views: queues in numbers, lists of tasks, saved fields of checkpoints.

views.py       queues in numbers; tasks and checkpoints by SCAN; workers beside what they hold
running.py     running tasks, from the pending lists
timeline.py    the tasks of all partitions by time, page by page
junk_items.py  items of other programs that workers moved away
"""
