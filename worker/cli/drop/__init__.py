"""`perdure drop`: a folder whose files become tasks and messages, for programs that can only write files.

command.py   the command: options, signals, and the loop that looks at the folder
folder.py    the files of a folder: which of them rest, and their moves between its subfolders
tasks.py     DIR/QUEUE/NAME.json and NAME.jsonl: tasks
messages.py  DIR/agents/AGENT/SESSION/NAME.txt and NAME.json: messages of a session
shared.py    DIR/shared/WORKSPACE/: the files of a shared workspace, both ways

How a file becomes a task once. The file is first moved to `.taken`, where its writer cannot replace it any more, then
its task is enqueued, then it is moved to `processed`. The id of the task is a digest of what does not change by a move:
the path, the size, the time of the last change, and the bytes.

    dies before the first move       the file is where its writer has put it: the next run takes it
    dies in `.taken`                 the next run begins with the files there, and enqueues under the same id
    reply lost                       the same: Redis stores nothing for an id that it knows
    power fails after a move         the file may be back where it was: it has the same id again
    another file of the same name    waits until the one in `.taken` is settled, and has another id

Redis knows an id until the record of its task expires, `result_ttl` after its end; a session knows its last 100
messages.
"""
