-- include: depth
-- Return how many tasks of a partition wait for a worker. Read-only.
-- KEYS  ready stream, due set
-- ARGV  '1' to count what is in the due set as well, else ''; number from which on waiting lists of limits are not counted
-- returns  the number
local scheduled = ARGV[1] == '1' and redis.call('ZCARD', KEYS[2]) or 0
return waiting(KEYS[1], tonumber(ARGV[2])) + scheduled
