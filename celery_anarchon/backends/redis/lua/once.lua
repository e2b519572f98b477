-- Claims without leases, decided in one step: strategy "script" always, "stream-id" and "idmp"
-- for batches with chained claims (after), which no single command can decide.
--
-- Units: instants are ms since the epoch by this server's clock, durations are ms.
--
-- KEYS     for every shard that the batch touches:
--            <prefix>:{<shard>}:last   sorted set, score = last slot, member = job
--            n × <prefix>:{<shard>}:runs:<job>   stream: the claims, the history too
--              , <prefix>:{<shard>}:job:<job>    hash: since (read), floor
-- ARGV[1]  what appends a claim, and finds it again:
--            scan  XADD *; found in the entries since its slot
--            id    XADD <slot>-0; found by its ID
--            idmp  XADD IDMP; found in the entries since its slot
-- ARGV[2]  replica; ARGV[3] runs to keep at least; ARGV[4] how far ahead a slot may lie
-- ARGV[5…] for every shard: n, then n × slot, token, terms
--            terms = "max_late keep [after]"
-- Reply    for every shard: n × outcome, 7 where the stream of an idmp job does not exist

local WON, LATE, EARLY, LOST, MISSING = 0, 3, 4, 6, 7
-- Entries read in one go, and ms of slots that share an IDMP producer: see idmp.py.
local PAGE, PRODUCER = 200, 10000

local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local mode, replica, history, tolerance = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])

local function digits(number)
  return string.format('%.0f', number)
end

-- The token of the claim that has the slot, or nil. No claim is accepted earlier than the
-- tolerance before its slot and IDs never fall, so no older entry needs to be read; and none
-- twice for the claims of one batch.
local read = {}
local function holder(stream, slot)
  if mode == 'id' then
    local entries = call('XRANGE', stream, slot .. '-0', slot .. '-0')
    return entries[1] and entries[1][2][2]
  end
  local first = math.max(tonumber(slot) - tolerance, 0)
  local known = read[stream]
  if not known or known.first > first then
    known = {first = first, tokens = {}}
    read[stream] = known
    local from = digits(first)
    repeat
      local entries = call('XRANGE', stream, from, '+', 'COUNT', PAGE)
      for _, entry in ipairs(entries) do
        known.tokens[entry[2][2]] = entry[2][4]
        from = '(' .. entry[1]
      end
    until #entries < PAGE
  end
  return known.tokens[slot]
end

local function append_id(stream, slot, token)
  local reply = redis.pcall('XADD', stream, 'MAXLEN', '~', history, slot .. '-0',
    'token', token, 'replica', replica, 'claimed', digits(now))
  if type(reply) == 'table' and reply.err then
    if string.find(reply.err, 'equal or smaller', 1, true) then
      return LOST
    end
    error(reply.err)
  end
  return WON
end

local function append_idmp(stream, slot, token)
  local id = call('XADD', stream, 'NOMKSTREAM', 'MAXLEN', '~', history,
    'IDMP', digits(math.floor(slot / PRODUCER)), slot, '*',
    'slot', slot, 'token', token, 'replica', replica, 'claimed', digits(now))
  if not id then
    return MISSING
  end
  local entries = call('XRANGE', stream, id, id)
  return entries[1] and entries[1][2][4] == token and WON or LOST
end

-- What is trimmed can't be found again: the floor says up to where slots may be forgotten.
local function append_scan(stream, slot, token, keep, hash)
  call('XADD', stream, '*',
    'slot', slot, 'token', token, 'replica', replica, 'claimed', digits(now))
  local surplus, oldest = call('XLEN', stream) - history, digits(now - keep)
  if surplus > 0 and call('XTRIM', stream, 'MINID', '~', oldest, 'LIMIT', surplus) > 0 then
    call('HSET', hash, 'floor', digits(now - keep + tolerance))
  end
  return WON
end

local function claim(key, stream, hash, slot, token, terms)
  local job = string.sub(hash, #key + 1)  -- "job:" is as long as "last"
  local late, keep, after = string.match(terms, '^(%S+) (%S+) ?(%S*)$')
  late, keep, after = tonumber(late), tonumber(keep), tonumber(after)
  local instant = tonumber(slot)
  if now - instant > keep and now - instant > late then
    return LATE
  end
  local token_found = holder(stream, slot)
  if token_found then
    return token_found == token and WON or LOST
  end
  if instant > now + tolerance then
    return EARLY
  end
  local known = call('HMGET', hash, 'since', 'floor')
  if now - instant > late or instant <= tonumber(known[2] or 0) then
    return LATE
  end
  if after then
    local last = tonumber(call('ZSCORE', key, job) or 0)
    if after ~= math.max(tonumber(known[1] or 0), last) then
      return LOST
    end
  end
  local outcome
  if mode == 'id' then
    outcome = append_id(stream, slot, token)
  elseif mode == 'idmp' then
    outcome = append_idmp(stream, slot, token)
  else
    outcome = append_scan(stream, slot, token, keep, hash)
  end
  if outcome == WON then
    call('ZADD', key, 'GT', slot, job)
    if read[stream] then
      read[stream].tokens[slot] = token
    end
  end
  return outcome
end

local replies, at, index = {}, 5, 1
while index <= #KEYS do
  local key, count, reply = KEYS[index], tonumber(ARGV[at]), {}
  for n = 1, count do
    reply[n] = claim(key, KEYS[index + 2 * n - 1], KEYS[index + 2 * n],
      ARGV[at + 3 * n - 2], ARGV[at + 3 * n - 1], ARGV[at + 3 * n])
  end
  replies[#replies + 1] = reply
  at, index = at + 3 * count + 1, index + 2 * count + 1
end
return replies
