-- Makes the streams of strategy "idmp" where they are missing, and tells how long each of them
-- remembers. XCFGSET with another value would forget every claim, so a stream is set up once.
--
-- Units: seconds.
--
-- KEYS     for every shard that the batch touches:
--            <prefix>:{idmp.<shard>}:last   (so that no call has one key only, see client.py)
--            n × <prefix>:{idmp.<shard>}:runs:<job>
-- ARGV[1]  how many ids a producer may have
-- ARGV[2…] for every shard: n, then n × duration for a stream that is new
-- Reply    for every shard: n × duration of its stream

local function duration_of(stream)
  local facts = redis.call('XINFO', 'STREAM', stream)
  for i = 1, #facts, 2 do
    if facts[i] == 'idmp-duration' then
      return facts[i + 1]
    end
  end
end

local replies, at, index = {}, 2, 1
while index <= #KEYS do
  local count, reply = tonumber(ARGV[at]), {}
  for n = 1, count do
    local stream = KEYS[index + n]
    if redis.call('EXISTS', stream) == 0 then
      redis.call('XGROUP', 'CREATE', stream, 'made', '$', 'MKSTREAM')
      redis.call('XGROUP', 'DESTROY', stream, 'made')
      redis.call('XCFGSET', stream, 'IDMP-DURATION', ARGV[at + n], 'IDMP-MAXSIZE', ARGV[1])
    end
    reply[n] = duration_of(stream)
  end
  replies[#replies + 1] = reply
  at, index = at + count + 1, index + count + 1
end
return replies
