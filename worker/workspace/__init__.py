"""Workspaces: folders of files that tasks work in, saved by content so that another host can restore them.

The package knows nothing of tasks and steps; `ctx.workspace` is in worker/workspace/task_workspace.py.

    manifest.py  what a workspace has: files, links and folders, their stored form and their limits
    scan.py      what is in a folder, and which of its files have changed
    folders.py   folders of running tasks, removed when their process has died, unless their files are not saved

A manifest is stored in the artifact store as the files are, so a checkpoint contains one small field, however many
files there are. Files and manifest are stored first and linked in the checkpoint afterwards.
"""
