-- include: limits
-- Renew tokens of limits.
-- KEYS  clock of the limits (see limits.lua)
-- ARGV  largest step of the virtual clock in ms, life of a token in ms, then of each token: member, number of uses, and of each
--       use: limit, key ('-' for none)
-- returns  positions (from 0) of tokens that are gone, wholly or in part: expired, released, or removed by an operator
-- Atomic per use. Only what has not expired is renewed, for another member may have been counted in its place since. Late bytes
-- renew no token that was released. The script writes on a full server as well, where a token that expires would let another
-- task start.
keep(KEYS[1])
tick(tonumber(ARGV[1]))
local expires = text(virtual + tonumber(ARGV[2]))
local gone = {}
local at, position = 3, 0
while at <= #ARGV do
  local member, uses = ARGV[at], tonumber(ARGV[at + 1])
  at = at + 2
  local lost = false
  for first = at, at + uses * 2 - 1, 2 do
    local name, key = ARGV[first], ARGV[first + 1]
    local held = tonumber(redis.call('ZSCORE', holders(name, '-'), key .. '/' .. member) or '')
    if held and held > virtual then
      renew(name, key, member, expires)
    else
      lost = true
    end
  end
  if lost then
    gone[#gone + 1] = position
  end
  position = position + 1
  at = at + uses * 2
end
return gone
