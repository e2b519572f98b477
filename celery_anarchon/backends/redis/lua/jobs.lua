-- What is known of jobs for ever: register their schedules' fingerprints.
--
-- Units: instants are ms since the epoch by this server's clock.
--
-- KEYS[i]  <prefix>:{<shard>}:jobs of every shard that the batch touches: set of job names.
-- The other key of a job is named from it, so that it carries the same hash tag:
--   <prefix>:{<shard>}:job:<job>   hash: first (seen), since, fp (fingerprint), last (slot)
-- ARGV     for each key: how many jobs n, then n × job, fingerprint
-- Reply    for each key: n × {first, since, last or nil}

local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))

local replies, at = {}, 1
for i, key in ipairs(KEYS) do
  local shard, reply = string.sub(key, 1, -5), {}
  local count = tonumber(ARGV[at])
  at = at + 1
  for n = 1, count do
    local job, fingerprint = ARGV[at], ARGV[at + 1]
    local hash = shard .. 'job:' .. job
    local known = redis.call('HMGET', hash, 'first', 'since', 'last', 'fp')
    if not known[1] or known[4] ~= fingerprint then
      known[1], known[2] = known[1] or now, now
      redis.call('HSET', hash, 'first', known[1], 'since', now, 'fp', fingerprint)
      redis.call('SADD', key, job)
    end
    reply[n] = {known[1], known[2], known[3]}
    at = at + 2
  end
  replies[i] = reply
end
return replies
