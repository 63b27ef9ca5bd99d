"""A model of the content of Redis after each act, compared with the server.

Every script that moves a task or writes a key of a task has a method of `machine.Queues` that runs it:

| script | method |
|---|---|
| answer | answer |
| await_resume | await_resume |
| await_version | await_version |
| bury | bury |
| cancel | cancel |
| claim | claim |
| clear_quarantined | acquit |
| close_exported | close_exported |
| close_partition | close |
| confirm_successor | confirm_successor |
| create_groups | join |
| discard | purge |
| dismiss | dismiss |
| due | promote |
| edit_checkpoint | edit_checkpoint |
| enqueue | enqueue |
| enqueue_child | enqueue_child |
| enqueue_copy | store_copy |
| enqueue_one | enqueue_one |
| enqueue_successor | hand |
| read_values | update |
| update_value | update |
| finish | finish |
| fire_schedule | fire_schedule |
| forget_task | forget_task |
| forget_waits | forget_waits |
| join_group | share |
| leave_group | leave |
| note_kept | note_kept |
| notice_sent | notice_sent |
| park | park |
| partition_status | is_as_expected |
| promote | promote |
| put_back | mistake |
| quarantine | set_aside |
| queue_depth | is_as_expected |
| raise_count | raise_count |
| read_inbox | send |
| release | release |
| remove_consumer | forget |
| renew_leases | beat |
| replace_stream | mistake |
| replay | replay |
| report_crash | crash |
| reschedule | retry |
| reset_task | reset |
| retire_partition | retire |
| schedule | enqueue |
| send_message | send |
| set_aside | move_to_junk |
| set_config | set_config |
| set_route | reroute |
| take_quarantined | take_suspect |
| touch | touch |
| trim_timeline | trim_timeline |
| upload_chunk | message |
| upload_events | upload_past |
| wake_for_limit | wake_for_limit |
| wake_paused | wake_paused |
| wake_version | wake_version |
| watch | watch_task |
| write_checkpoint | record |

Scripts of sessions (session_begin, session_correct, session_end, session_forget, session_look, session_send) have a
model of their own, `test_sessions`, and so have those of joins (add_children, close_join, confirm_launch, notify_join,
put_result_chunk), `test_joins`, and those of tokens (hold_limit, publish_limit, release_limits, renew_limits,
take_limits), `test_limits`, and those of waiting lists (enqueue_limited, look_limited, admit_limited, await_limit,
count_limited), `test_admission`. Scripts that write no key of a task have none: records of workers and supervisors
(count_crash, drain_worker, register_supervisor, register_worker, unpause_supervisor), identities (set_identity),
files of shared workspaces (put_file), tokens of waits (claim_token), markers of unique keys (claim_unique), what
operators set for limits (set_limit), ledgers of budgets (ask_for_budget, charge_budget, raise_budget), schedules,
jobs and pauses (write_compared), reads of tokens that parked tasks keep (look_kept), keys of another type
(set_key_aside), reads of a task's past (load_history, read_log), and pages of a hash (hash_page).
A copy of a task that has ended (store_ended) has none either: the script renames what was uploaded for one new task.
Scripts of the key-value store (store, store_list, store_read, store_write) write no key of a task.
tests/conformance has their tests.
"""
