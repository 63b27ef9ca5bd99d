-- The prelude of scripts that make keys from that of a task, since only its record says which: `tag` in `-- include:`.
-- tag_of(key): what all keys of the slot begin with.
local function tag_of(key)
  return string.match(key, '^.-}:')
end
