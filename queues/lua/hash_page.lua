-- Read a page of the fields of a hash, and which server process has read it.
-- KEYS  hash
-- ARGV  cursor, pattern of the fields, number of fields to look at
-- returns  {run_id of the server, empty if the user may not run INFO, next cursor, names and values}
-- Both come from one server: a cursor means nothing to another process. Read-only.
local info = redis.pcall('INFO', 'server')
local process = type(info) == 'string' and string.match(info, 'run_id:(%x+)') or ''
local page = redis.call('HSCAN', KEYS[1], ARGV[1], 'MATCH', ARGV[2], 'COUNT', ARGV[3])
return {process, page[1], page[2]}
