"""Conformance suite: every script and its Python call, on fakeredis and on real servers.

The `gateway` fixture runs each test on every server of the matrix (see tests/conftest.py). Tests of one script are in
one file; `delivery` has those of perdure.queues.delivery. tests/conformance/test_scripts.py checks this table, and what
holds for all scripts.

| file | scripts |
|---|---|
| `test_admission` | admit_limited, await_limit, count_limited, enqueue_limited, look_limited |
| `test_budgets` | ask_for_budget, charge_budget, raise_budget |
| `test_bury_and_replay` | bury, discard, replay |
| `delivery/test_checkpoint_edit` | edit_checkpoint |
| `delivery/test_checkpoint` | load_history, read_log, write_checkpoint |
| `delivery/test_consumer` | claim, create_groups, leave_group, remove_consumer |
| `delivery/test_due_set` | due, promote, schedule |
| `test_enqueue` | enqueue |
| `test_max_depth` | queue_depth |
| `test_inbox` | park, read_inbox, send_message |
| `delivery/test_large_arguments` | enqueue_one, upload_chunk |
| `test_joins` | add_children, close_join, confirm_launch, enqueue_child |
| `test_joins` | notice_sent, notify_join, put_result_chunk, watch |
| `test_limits` | hold_limit, publish_limit, release_limits, renew_limits, take_limits |
| `delivery/test_lost_tasks` | put_back, replace_stream |
| `delivery/test_leases` | raise_count, renew_leases |
| `delivery/test_quarantine` | clear_quarantined, quarantine, report_crash, take_quarantined |
| `test_queue_rates` | register_worker |
| `test_resharding` | close_partition, join_group, partition_status, retire_partition, set_route |
| `delivery/test_hash_scan` | hash_page |
| `test_results` | cancel, finish |
| `test_scripts` | reset_task |
| `test_schedules` | fire_schedule, write_compared |
| `sessions/test_protocol` | session_begin, session_correct, session_end, session_forget, session_look, session_send |
| `sessions/test_removal` | forget_task |
| `test_limit_control` | set_limit |
| `test_junk` | set_aside |
| `delivery/test_kept_tokens` | look_kept, note_kept, wake_for_limit |
| `test_wrong_types` | set_key_aside |
| `delivery/test_settlement` | release, reschedule |
| `registries/test_shared_config` | set_config |
| `test_store` | store_list, store_read, store_write |
| `test_successor` | confirm_successor, enqueue_successor |
| `test_timeline` | trim_timeline |
| `test_pauses` | await_resume, wake_paused |
| `delivery/test_transfer` | close_exported, enqueue_copy, store_ended, upload_events |
| `test_unique` | claim_unique |
| `test_values` | read_values, update_value |
| `test_versions` | await_version, wake_version |
| `test_waits` | answer, claim_token, forget_waits |
| `registries/test_draining` | drain_worker |
| `registries/test_supervisors` | count_crash, register_supervisor, unpause_supervisor |
| `delivery/test_touch` | touch |
| `findings/test_notes_and_dismissals` | dismiss |
| `workspaces/test_identities` | set_identity |
| `workspaces/test_shared_files` | put_file |

The other files test what several scripts promise together: `test_one_place` that a task is always in one place,
`test_wrong_types` that a script does on a key of another type what it does on a missing one,
`delivery/test_fleet_locks` and `test_janitor` the chores of one worker, `test_inspection`, `test_limit_views` and
`test_saved_fields` the read-only views, `test_enqueue_many` batches, and `late` that bytes which arrive late change
nothing.
"""
