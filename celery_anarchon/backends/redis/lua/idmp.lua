-- Makes the streams of strategy "idmp" where they are missing, and tells how long each of them
-- remembers. XCFGSET with another value would forget every claim, so a stream is set up once.
--
-- Units: seconds.
--
-- KEYS[i]  <prefix>:{idmp.<shard>}:last of every shard that the batch touches.
-- The streams are named from it, so that they carry the same hash tag:
--   <prefix>:{idmp.<shard>}:runs:<job>
-- ARGV[1]  how many ids a producer may have
-- ARGV[2…] for each key: how many jobs n, then n × job, duration for a stream that is new
-- Reply    for each key: n × duration of its stream

local function duration_of(stream)
  local facts = redis.call('XINFO', 'STREAM', stream)
  for i = 1, #facts, 2 do
    if facts[i] == 'idmp-duration' then
      return facts[i + 1]
    end
  end
end

local replies, at = {}, 2
for i, key in ipairs(KEYS) do
  local shard, reply = string.sub(key, 1, -5), {}
  local count = tonumber(ARGV[at])
  at = at + 1
  for n = 1, count do
    local stream = shard .. 'runs:' .. ARGV[at]
    if redis.call('EXISTS', stream) == 0 then
      redis.call('XGROUP', 'CREATE', stream, 'made', '$', 'MKSTREAM')
      redis.call('XGROUP', 'DESTROY', stream, 'made')
      redis.call('XCFGSET', stream, 'IDMP-DURATION', ARGV[at + 1], 'IDMP-MAXSIZE', ARGV[1])
    end
    reply[n] = duration_of(stream)
    at = at + 2
  end
  replies[i] = reply
end
return replies
