"""Sessions: conversations that outlive the tasks of their turns.

Each message is one turn, and each turn is one task, with the number of its message. The record of a session and the
task of a turn are in different hash slots, so no script may change both. The protocol between them consists of
idempotent steps:

    send        stores the message and, if no turn runs, claims the turn; then the sender stores the task of that turn
    begin       the run of the task reads message and state, unless a later turn was claimed
    (the run)   records its steps, and at last its result, under its lease, as any task
    end         stores state, answer and history, and claims the next turn if a message waits, whose task the run stores
    settle      the run stores its outcome, as any task

A correction of the state goes to the inbox of the task of a turn that runs. If none does, the session stores it, begin
reads it, the run puts it into that inbox under its id, and the end that stores a state removes it.

If a process dies before a step, another one repeats it: a redelivered run repeats begin and end (its recorded result is
not computed again); a worker that looks at sessions once a minute (`check_session`) stores the task of a claimed turn
that has none, and ends or fails the turn of a task that has ended without doing so. A turn whose message cannot be
read, or whose task id belongs to another task, ends without an answer, and the next one is claimed. A caller that
cancels the task of a turn which no worker runs ends the turn, too. The task id contains session, time of its first
message and turn, so that a task is stored once while its record exists; a task that is stored again later is refused by
begin. A turn that has ended is not ended again: a late run changes nothing. If Redis loses the claim of a turn whose
task is stored, begin and end let the task wait until the turn before it has claimed it again.

Where data is encrypted, a message is bound to its number and to the time of the first message of its session; so the
sender reads both before it stores the message. The script refuses a message for another place; the sender encrypts it
again. A turn leaves a basis to the next one: the numbers of the state, files and corrections that count, and queue,
app and inputs, all encrypted under the number of the turn that ended. A turn runs only on the basis of the turn before
it. So what another program puts back, an old message, state, link, input or correction, ends the turn or stops the
session with the reason. The counters, times and reasons of ends are plain, since scripts write them.

    record.py       the record of a session, its history, and lists of sessions
    turns.py        the steps of the protocol
    removal.py      removal of a session, with the tasks of its turns or after its retention
"""
