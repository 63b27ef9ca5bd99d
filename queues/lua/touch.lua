-- include: seen
-- Touch a partition that no heartbeat or sweep may reach now: all slots are taken, or no task runs.
-- KEYS  ready stream, seen
-- ARGV  group, lease in milliseconds, consumer of released messages
-- returns  the touch (see seen.lua)
return (touch(KEYS[2], KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3]))
