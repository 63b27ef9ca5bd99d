"""Deliveries: reading and claiming messages, leases, checkpoints and settlement.

| module | what it holds |
|---|---|
| `consumer` | reads new messages, claims those of lost workers, leaves the groups |
| `stream_reader` | blocking XREADGROUP over the partitions of one server or of a cluster |
| `leases` | the delivery with its fencing token; the table of deliveries that this worker holds |
| `heartbeat` | renews the leases from a thread |
| `checkpoint` | entries of the checkpoint: written by a run, read by the next one |
| `step_pages` | step records of a large checkpoint, read when the run asks for them |
| `settlement` | what ends a delivery: succeed, cancel, reschedule, park, release (bury is in `deadletter`) |
| `quarantine_store` | tasks that are suspected of killing workers |
| `due_set` | promotion of scheduled tasks |
| `paused_tasks` | tasks that pauses of operators hold |
| `lost_tasks` | tasks that another program has taken out of the queue, and their return |
| `fleet_locks` | locks that leave a chore to one worker of the fleet |

Before a change: every write for a delivery is made by a script that includes `fence.lua`, and is refused once the lease
has passed. A message is acknowledged only in the script that stores its outcome. Each script may be called twice,
because a reply may be lost, except for those that hand out messages (`run_once`). tests/model checks all of that; a new
script needs a rule there.
"""
