-- The prelude of scripts that use the values of a task, which are fields of its inbox: `inbox, values` in the line
-- `-- include:`. Any client may write there, so what has another form counts as missing.
-- value_names(inbox): the names of the values, in the order in which they were first set, and a table that has them as keys.
-- value_number(inbox, name): the number of the last change of a value; 0 without one.
-- set_value(inbox, record, name, value, number): store a value under the next number, or under the given one, and notify.
local function value_names(inbox)
  local names, known = {}, {}
  if redis.call('HSTRLEN', inbox, 'values') <= 10000 then
    for name in string.gmatch(redis.call('HGET', inbox, 'values') or '', '%S+') do
      names[#names + 1] = name
      known[name] = true
    end
  end
  return names, known
end

local function value_number(inbox, name)
  return inbox_number(string.match(redis.call('HGET', inbox, 'v:' .. name) or '', '^(%d+) '))
end

local function set_value(inbox, record, name, value, number)
  local names, known = value_names(inbox)
  local last = inbox_number(redis.call('HGET', inbox, 'changed'))
  if not number then
    local time = redis.call('TIME')
    number = math.max(time[1] * 1000 + math.floor(time[2] / 1000), last < LARGEST_COUNT and last + 1 or 0)
  end
  if not known[name] then
    names[#names + 1] = name
    redis.call('HSET', inbox, 'values', table.concat(names, ' '))
  end
  redis.call('HSET', inbox, 'v:' .. name, string.format('%.0f', number) .. ' ' .. value,
    'changed', string.format('%.0f', math.max(number, last)))
  redis.call('PUBLISH', record, 'value')
end
