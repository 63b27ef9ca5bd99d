-- The prelude of scripts that end, delete or replay a task: `streams` in the line `-- include:`.
-- stream_keys(record): the keys of the streams into which the task has emitted items, from the names in field `streams`
--   of its record, and those of the digests of keyed items if there are any (field keyed). Called before the first write of
--   a script: a node of a migrating slot refuses a key that has moved, and no script ends in its middle.
-- Such keys are in the hash slot of the record, and are named here since only the record says which there are.
local function stream_keys(record)
  local known, keys = redis.call('HMGET', record, 'streams', 'keyed'), {}
  for name in string.gmatch(known[1] or '', '%S+') do
    if #keys < 32 then
      keys[#keys + 1] = string.gsub(record, '}:record:', '}:stream:', 1) .. ':' .. name
      if known[2] then
        keys[#keys + 1] = string.gsub(record, '}:record:', '}:stream-keys:', 1) .. ':' .. name
      end
    end
  end
  if keys[1] then
    redis.call('EXISTS', unpack(keys))
  end
  return keys
end

local function expire_streams(keys, ttl)
  for _, key in ipairs(keys) do
    redis.call('PEXPIRE', key, ttl)
  end
end
