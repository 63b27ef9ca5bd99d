-- The prelude of scripts that make a message from a record: `payload` in the line `-- include:`.
-- payload(record, task): envelope and arguments of a task, as its message has them; nothing if the record lacks them. A
--   record keeps only the names of an envelope that holds no more than the id and these (see enqueue.lua).
local function quoted(text)
  return '"' .. string.gsub(text, '[%c"\\]', function(char)
    return string.format('\\u%04x', string.byte(char))
  end) .. '"'
end

local function payload(record, task)
  local envelope, arguments, name, app = unpack(redis.call('HMGET', record, 'env', 'args', 'task', 'app'))
  if not envelope and name then
    envelope = '{"v":1,"id":"' .. task .. '","task":' .. quoted(name) .. (app and ',"app":' .. quoted(app) or '') .. '}'
  end
  if envelope then
    return envelope, arguments or '{}'
  end
end
