-- The prelude of scripts that read what any client may have written: a reader gets at most so many bytes.
-- bound_values(values, first, step, limit): replace the values of a reply, from `first` on, each `step`, that do not fit
--   into the limit together with those before them by their size, an integer.
-- entry_size(entry): bytes of the fields of an entry of a stream.
-- cut_entry(entry, size): replace its fields by type, number and `bytes`, their size.
local function bound_values(values, first, step, limit)
  for i = first, #values, step do
    local size = values[i] and #values[i] or 0
    if size > limit then
      values[i] = size
    else
      limit = limit - size
    end
  end
  return values
end

local function entry_size(entry)
  local size = 0
  for i = 1, #entry[2] do
    size = size + #entry[2][i]
  end
  return size
end

local function cut_entry(entry, size)
  local fields, kept = entry[2], {'bytes', tostring(size)}
  for i = 1, #fields, 2 do
    if (fields[i] == 'type' or fields[i] == 'n') and #fields[i + 1] <= 64 then
      kept[#kept + 1] = fields[i]
      kept[#kept + 1] = fields[i + 1]
    end
  end
  entry[2] = kept
end
