-- include: depth
-- Return how many tasks of a partition wait for limits. Read-only.
-- KEYS  rings
-- ARGV  largest number of KEYIDs to look at
-- returns  their number; a lower bound if there are more KEYIDs. Of an ordered KEYID, a first task that has started is left
--          out
return in_lists(KEYS[1], tonumber(ARGV[1]))
