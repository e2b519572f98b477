-- The lease store: claim, queue, confirm, renew, finish and take over runs, a batch in one step.
-- It says the same as backends/rules.py; the contract suite holds the two equal.
--
-- Units: instants are ms since the epoch by this server's clock, durations are ms.
--
-- KEYS     for every shard that the batch touches:
--   <prefix>:{<shard>}:leases              sorted set, score = end of the lease,
--                                          member = <slot>:<job>
--   n × <prefix>:{<shard>}:job:<job>       hash:   first, since, fp, last, floor;
--                                                  confirmed  when a worker last confirmed a run;
--                                                  <slot>     one live run, packed;
--                                                  b<bucket>  when the bucket expires;
--                                                  a<slot>    attempts of an ended run that
--                                                             had more than one
-- The other keys are named from these, so that they carry the same hash tag. Not to find one of
-- them makes a claim late, never won:
--   <prefix>:{<shard>}:done:<bucket>:<job> set:    ended slots; a skipped one as -<slot>
--   <prefix>:{<shard>}:runs:<job>          stream: the history, one entry per change
--   <prefix>:{<shard>}:jobs                set:    names of all jobs
--
-- ARGV[1]  operation; ARGV[2] replica; ARGV[3] entries of a job's history, 0 for none;
-- ARGV[4]  what the operation needs besides;
-- ARGV[5…] for every shard: n, then n items.
--
--   operation  ARGV[4]    item               reply for every shard
--   claim      tolerance  slot, token, terms n × attempt * 8 + outcome
--   renew      lease      held               n × 0 or 1
--   finish     state      held               n × 0 or 1
--   refinish   state      held               n × 0 or 1
--   queue      again      held               n × 0 or 1
--   confirm    by         held               n × 0 or 1
--   publish    -          held, commands     n × 0, 1, or the error of a command
--   take       -          slot               n × a run, or empty where its lease is not over
--   expired    how many   - (no jobs)        instead: the runs whose leases are over, of all shards
--   terms = "lease max_late attempts overlap keep [after]", overlap 1 for "skip".
--   held  = slot, token, leg, wait; wait is empty where the run is done when its message is sent.
--   again = 1 where the message of this very leg comes once more, else 0; by = "lease mark worker".
--   a run = {slot:job, attempt, state, replica, token, claimed, finished, worker, started}
--   commands = how many, then for each its length and its words. They are executed as they are,
--   on one server only, since their keys are the broker's.
--   refinish is finish sent again after a cut connection: 1 also where the first did it.

local BUCKET = 512000
local WON, RUNNING, DONE, LATE, EARLY, OVERLAP, LOST = 0, 1, 2, 3, 4, 5, 6
-- Fields of a packed live run.
local ATTEMPT, TOKEN, LEASE_END, STATE, ATTEMPTS, LATE_AT, FORGET_AT, REPLICA, CLAIMED =
  1, 2, 3, 4, 5, 6, 7, 8, 9
local WORKER, STARTED, LEG, MARK = 10, 11, 12, 13

local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local operation, replica, history = ARGV[1], ARGV[2], tonumber(ARGV[3])

local function digits(number)
  return string.format('%.0f', number)
end

local function record(shard, job, slot, run, state)
  if history > 0 then
    local entry = {
      'slot', slot, 'state', state, 'attempt', run[ATTEMPT], 'token', run[TOKEN],
      'replica', run[REPLICA], 'claimed', digits(run[CLAIMED]),
      'worker', run[WORKER], 'started', run[STARTED] and digits(run[STARTED]),
    }
    call('XADD', shard .. 'runs:' .. job, 'MAXLEN', '~', history, '*',
      unpack(entry, 1, run[STARTED] and 16 or 12))
  end
end

local function bucket_of(slot)
  return math.floor(slot / BUCKET)
end

local function done_key(shard, job, bucket)
  return shard .. 'done:' .. digits(bucket) .. ':' .. job
end

-- Slots up to the floor may be forgotten, so nobody wins them any more. A slot after the last
-- one that was ever won can't have been forgotten.
local function raise_floor(key, bucket)
  local known = call('HMGET', key, 'floor', 'last')
  local floor = math.min((bucket + 1) * BUCKET - 1, tonumber(known[2] or 0))
  if floor > tonumber(known[1] or 0) then
    call('HSET', key, 'floor', digits(floor))
  end
end

local function forget_old_buckets(shard, job, key)
  local fields = call('HGETALL', key)
  for i = 1, #fields, 2 do
    local bucket = tonumber(string.match(fields[i], '^b(%d+)$'))
    if bucket and tonumber(fields[i + 1]) < now then
      raise_floor(key, bucket)
      call('HDEL', key, fields[i])
      call('DEL', done_key(shard, job, bucket))
    end
  end
  local floor = tonumber(call('HGET', key, 'floor') or 0)
  for i = 1, #fields, 2 do
    local slot = string.match(fields[i], '^a(%d+)$')
    if slot and tonumber(slot) <= floor then
      call('HDEL', key, fields[i])
    end
  end
end

-- Remembers in the set of its bucket that a slot was taken, at least until slot + keep.
-- A bucket whose set is gone although the job knows of it (expired, evicted, the clock stepped)
-- may have held any of its slots: the floor covers them.
local function remember(shard, job, slot, keep, member)
  local key, bucket = shard .. 'job:' .. job, bucket_of(slot)
  local done, field = done_key(shard, job, bucket), 'b' .. digits(bucket)
  local expiry = (bucket + 1) * BUCKET + keep
  local known = tonumber(call('HGET', key, field) or nil)
  call('SADD', done, member)
  local begun = call('SCARD', done) == 1
  if begun and known then
    raise_floor(key, bucket)
  end
  if not known or known < expiry then
    call('HSET', key, field, digits(expiry))
  else
    expiry = known
  end
  if begun or known ~= expiry then
    call('PEXPIREAT', done, digits(expiry))
  end
  if not known then
    forget_old_buckets(shard, job, key)
  end
end

local function write(shard, job, slot, run)
  call('HSET', shard .. 'job:' .. job, slot, cmsgpack.pack(run))
  call('ZADD', shard .. 'leases', digits(run[LEASE_END]), slot .. ':' .. job)
end

local function stop(shard, job, slot, run, state)
  call('HDEL', shard .. 'job:' .. job, slot)
  call('ZREM', shard .. 'leases', slot .. ':' .. job)
  remember(shard, job, tonumber(slot), run[FORGET_AT] - tonumber(slot), slot)
  if run[ATTEMPT] > 1 then
    call('HSET', shard .. 'job:' .. job, 'a' .. slot, run[ATTEMPT])
  end
  record(shard, job, slot, run, state)
end

local function live(shard, job, slot)
  local run = call('HGET', shard .. 'job:' .. job, slot)
  return run and cmsgpack.unpack(run)
end

-- The claim -----------------------------------------------------------------------------------

local parsed = {}
local function parse(terms)
  local known = parsed[terms]
  if not known then
    local lease, late, attempts, overlap, keep, after =
      string.match(terms, '^(%S+) (%S+) (%S+) (%S+) (%S+) ?(%S*)$')
    known = {
      lease = tonumber(lease), late = tonumber(late), attempts = tonumber(attempts),
      skip = overlap == '1', keep = tonumber(keep), after = tonumber(after),
    }
    parsed[terms] = known
  end
  return known
end

local function win(shard, job, slot, token, terms, attempt)
  local run = {
    attempt, token, now + terms.lease, 'running', terms.attempts,
    slot + terms.late, slot + terms.keep, replica, now, '', false, 0, '',
  }
  write(shard, job, slot, run)
  record(shard, job, slot, run, 'running')
  return attempt * 8 + WON
end

local function another_lives(key, slot)
  local fields = call('HGETALL', key)
  for i = 1, #fields, 2 do
    if string.find(fields[i], '^%-?%d') and fields[i] ~= slot then
      local run = cmsgpack.unpack(fields[i + 1])
      if run[STATE] ~= 'released' and run[LEASE_END] >= now then
        return true
      end
    end
  end
  return false
end

-- Whether a run waited in a queue, and no worker is known to confirm any of its job.
local function in_vain(key, run)
  return run[STATE] == 'queued' and not call('HGET', key, 'confirmed')
end

-- What is known of a slot that no live run holds, or nil.
local function ended(shard, job, slot, attempt)
  local done = done_key(shard, job, bucket_of(slot))
  if call('SISMEMBER', done, slot) == 1 then
    return attempt * 8 + DONE
  elseif call('SISMEMBER', done, '-' .. slot) == 1 then
    return OVERLAP
  elseif call('EXISTS', done) == 0 then
    return LATE
  end
end

-- Notes that the slot has had its chance.
local function advance(shard, job, slot, last)
  if not last then
    call('SADD', shard .. 'jobs', job)
  end
  if not last or tonumber(slot) > last then
    call('HSET', shard .. 'job:' .. job, 'last', slot)
  end
end

local function record_not_run(shard, job, slot, token, state)
  local run = {0, token, now, state, 0, 0, 0, replica, now, '', false, 0, ''}
  record(shard, job, slot, run, state)
end

local function claim(shard, job, slot, token, terms)
  local key = shard .. 'job:' .. job
  local field = 'b' .. digits(bucket_of(slot))
  local known = call('HMGET', key, slot, 'floor', 'last', 'since', field, 'a' .. slot)
  terms = parse(terms)
  if known[1] then
    local run = cmsgpack.unpack(known[1])
    local attempt = run[ATTEMPT]
    if run[STATE] == 'released' then
      if now > run[LATE_AT] then
        stop(shard, job, slot, run, 'interrupted')
        return attempt * 8 + LATE
      end
      return win(shard, job, slot, token, terms, attempt)
    elseif run[TOKEN] == token and run[LEG] == 0 and run[STATE] == 'running' then
      return win(shard, job, slot, token, terms, attempt)
    elseif run[LEASE_END] >= now then
      return attempt * 8 + RUNNING
    elseif attempt >= terms.attempts or in_vain(key, run) then
      stop(shard, job, slot, run, 'interrupted')
      return attempt * 8 + DONE
    end
    return win(shard, job, slot, token, terms, attempt + 1)
  end

  local instant = tonumber(slot)
  local floor, last = tonumber(known[2] or 0), tonumber(known[3] or nil)
  if last and instant <= last and known[5] then
    local verdict = ended(shard, job, slot, tonumber(known[6] or 1))
    if verdict then
      return verdict
    end
  end
  if instant > now + tonumber(ARGV[4]) then
    return EARLY
  elseif instant <= floor then
    return LATE
  end
  local chain_end = math.max(tonumber(known[4] or 0), last or 0)
  local in_turn = not terms.after or terms.after == chain_end
  if now - instant > terms.late then
    if in_turn and chain_end > 0 and instant > chain_end then
      advance(shard, job, slot, last)
      record_not_run(shard, job, slot, token, 'late')
    end
    return LATE
  elseif not in_turn then
    return LOST
  end
  advance(shard, job, slot, last)
  if terms.skip and another_lives(key, slot) then
    remember(shard, job, instant, terms.keep, '-' .. slot)
    record_not_run(shard, job, slot, token, 'skipped')
    return OVERLAP
  end
  return win(shard, job, slot, token, terms, 1)
end

-- What its holder does with a run ---------------------------------------------------------------

local function mine(shard, job, slot, token, leg)
  local run = live(shard, job, slot)
  if run and run[STATE] ~= 'released' and run[TOKEN] == token and run[LEG] == tonumber(leg) then
    return run
  end
end

local function renew(shard, job, slot, token, leg)
  local run, lease = mine(shard, job, slot, token, leg), tonumber(ARGV[4])
  if not run then
    return 0
  end
  run[LEASE_END] = lease > 0 and now + lease or now - 1
  write(shard, job, slot, run)
  return 1
end

local function finish(shard, job, slot, token, leg)
  local run, state = mine(shard, job, slot, token, leg), ARGV[4]
  if not run then
    return 0
  end
  if state == 'released' then
    run[STATE], run[LEASE_END] = state, now - 1
    write(shard, job, slot, run)
    record(shard, job, slot, run, state)
  else
    stop(shard, job, slot, run, state)
  end
  return 1
end

local function refinish(shard, job, slot, token, leg)
  if finish(shard, job, slot, token, leg) == 1 then
    return 1
  end
  for _, entry in ipairs(call('XREVRANGE', shard .. 'runs:' .. job, '+', '-')) do
    local fields = entry[2]
    if fields[2] == slot and fields[4] == ARGV[4] and fields[8] == token then
      return 1
    end
  end
  return 0
end

local function enqueue(shard, job, slot, run, wait)
  run[STATE], run[LEASE_END] = 'queued', now + (tonumber(wait) or 0)
  write(shard, job, slot, run)
  record(shard, job, slot, run, 'queued')
end

local function queue(shard, job, slot, token, leg, wait)
  local run = mine(shard, job, slot, token, leg)
  if not run then
    return 0
  end
  run[LEG] = run[LEG] - tonumber(ARGV[4])
  enqueue(shard, job, slot, run, wait)
  return 1
end

-- Lets a worker begin a leg of an attempt that is later than those begun.
local function confirm(shard, job, slot, token, leg)
  local lease, mark, worker = string.match(ARGV[4], '^(%S+) (%S+) (.*)$')
  local run, key, leg = live(shard, job, slot), shard .. 'job:' .. job, tonumber(leg)
  if not run or run[STATE] == 'released' or run[TOKEN] ~= token
    or run[LEG] > leg or run[LEG] == leg and run[MARK] ~= mark then
    return 0
  end
  run[STATE], run[LEG], run[MARK] = 'running', leg, mark
  run[WORKER], run[STARTED], run[LEASE_END] = worker, now, now + tonumber(lease)
  write(shard, job, slot, run)
  record(shard, job, slot, run, 'running')
  call('HSET', key, 'confirmed', digits(now))
  return 1
end

-- Executes the commands that publish a run's message, and ends or queues the run, if the token
-- holds and it was not done before.
local function publish(shard, job, slot, token, leg, wait, commands)
  local run = mine(shard, job, slot, token, leg)
  if not run or run[STATE] ~= 'running' then
    return 0
  end
  for _, command in ipairs(commands) do
    local reply = redis.pcall(unpack(command))
    if type(reply) == 'table' and reply.err then
      return reply.err
    end
  end
  if wait == '' then
    stop(shard, job, slot, run, 'done')
  else
    enqueue(shard, job, slot, run, wait)
  end
  return 1
end

local function commands_at(at)
  local commands, count = {}, tonumber(ARGV[at])
  at = at + 1
  for n = 1, count do
    local words = tonumber(ARGV[at])
    commands[n] = {unpack(ARGV, at + 1, at + words)}
    at = at + 1 + words
  end
  return commands, at
end

-- Take over -----------------------------------------------------------------------------------

local function over(key, run)
  if now > run[FORGET_AT] or in_vain(key, run) then
    return true
  elseif run[STATE] == 'released' then
    return now > run[LATE_AT]
  end
  return run[ATTEMPT] >= run[ATTEMPTS]
end

local function take(shard, job, slot)
  local run, member = live(shard, job, slot), slot .. ':' .. job
  if not run then
    call('ZREM', shard .. 'leases', member)
    return {}
  elseif run[LEASE_END] >= now then
    return {}
  end
  local state, finished = run[STATE], ''
  if over(shard .. 'job:' .. job, run) then
    state, finished = 'interrupted', digits(now)
    stop(shard, job, slot, run, state)
  end
  return {
    member, run[ATTEMPT], state, run[REPLICA], run[TOKEN], digits(run[CLAIMED]), finished,
    run[WORKER], run[STARTED] and digits(run[STARTED]) or '',
  }
end

local function expired()
  local limit, found, reply = tonumber(ARGV[4]), {}, {}
  for _, key in ipairs(KEYS) do
    local members = call('ZRANGEBYSCORE', key, '-inf', '(' .. digits(now),
      'WITHSCORES', 'LIMIT', 0, limit)
    for i = 1, #members, 2 do
      found[#found + 1] = {string.sub(key, 1, -7), members[i], tonumber(members[i + 1])}
    end
  end
  table.sort(found, function(one, two) return one[3] < two[3] end)
  for i = 1, math.min(limit, #found) do
    local slot, job = string.match(found[i][2], '^(%-?%d+):(.*)$')
    reply[i] = take(found[i][1], job, slot)
  end
  return reply
end

if operation == 'expired' then
  return expired()
end

local decide = ({
  claim = claim, renew = renew, finish = finish, refinish = refinish, queue = queue,
  confirm = confirm, publish = publish, take = take,
})[operation]
local width = ({claim = 3, take = 1})[operation] or 4
local replies, at, index = {}, 5, 1
while index <= #KEYS do
  local shard, count, reply = string.sub(KEYS[index], 1, -7), tonumber(ARGV[at]), {}
  at = at + 1
  for n = 1, count do
    local job = string.sub(KEYS[index + n], #shard + 5)
    local slot, token, more, wait, commands = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
    at = at + width
    if operation == 'publish' then
      commands, at = commands_at(at)
    end
    reply[n] = decide(shard, job, slot, token, more, wait, commands)
  end
  replies[#replies + 1] = reply
  index = index + count + 1
end
return replies
