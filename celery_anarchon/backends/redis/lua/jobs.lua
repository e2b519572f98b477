-- What is known of jobs for ever: register their schedules' fingerprints.
--
-- Units: instants are ms since the epoch by this server's clock.
--
-- KEYS     for every shard that the batch touches:
--            <prefix>:{<shard>}:jobs        set: names of all jobs
--            n × <prefix>:{<shard>}:job:<job>
--                                           hash: first (seen), since, fp (fingerprint),
--                                           last (slot)
-- ARGV     for every shard: n, then n × fingerprint
-- Reply    for every shard: n × {first, since, last or nil}

local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))

local replies, at, index = {}, 1, 1
while index <= #KEYS do
  local jobs, count, reply = KEYS[index], tonumber(ARGV[at]), {}
  for n = 1, count do
    local hash, fingerprint = KEYS[index + n], ARGV[at + n]
    local known = redis.call('HMGET', hash, 'first', 'since', 'last', 'fp')
    if not known[1] or known[4] ~= fingerprint then
      known[1], known[2] = known[1] or now, now
      redis.call('HSET', hash, 'first', known[1], 'since', now, 'fp', fingerprint)
      -- The job's name begins where it does because "job:" is as long as "jobs".
      redis.call('SADD', jobs, string.sub(hash, #jobs + 1))
    end
    reply[n] = {known[1], known[2], known[3]}
  end
  replies[#replies + 1] = reply
  at, index = at + count + 1, index + count + 1
end
return replies
