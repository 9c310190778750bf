--- acquire: count `permits` in the newest bucket of every ring, or refuse and count a block in each.
--- KEYS   ring...
--- ARGV   stamp (permits limit bucket_ms shape)... [calls] [now_ms] [write_limit]
--- RETURN stamp left now_ms                                           one ring, all admitted
--- RETURN stamp left now_ms index reset_ms                            all admitted
--- RETURN stamp left now_ms index reset_ms bucket_start_ms...         all admitted, a ring is ahead of now_ms
--- RETURN stamp -1 now_ms index left reset_ms retry_ms admitted [index left reset_ms]   the first `admitted` calls were admitted, the others refused
--- RETURN stamp -1 now_ms index left reset_ms retry_ms admitted index left reset_ms bucket_start_ms...   and a ring is ahead
--- RETURN stamp -2 now_ms                                             past its deadline, nothing done
--- One script call stands for `calls` calls of equal cost: permits = calls * cost, and as many calls
--- are admitted as fit. With `write_limit` the limit is stored at once, not only when the next bucket
--- opens. Where a ring's newest bucket begins after now_ms (the clock was set back), the reply names
--- the bucket in which each ring has counted.
local KEYS, ARGV, call = KEYS, ARGV, redis.call
-- The positions of the arguments that follow those of the rings. (One ring, the usual case, is spared
-- the arithmetic.)
local CALLS, NOW, WRITE_LIMIT = 6, 7, 8
if KEYS[2] then CALLS, NOW, WRITE_LIMIT = #KEYS * 4 + 2, #KEYS * 4 + 3, #KEYS * 4 + 4 end
local stamp, client_now = ARGV[1], ARGV[NOW]
--@include shared/clock.lua
--@include acquire/hot.lua
--@include acquire/refuse.lua
--@include shared/deadline.lua
--@include acquire/rotate.lua
--@include shared/format.lua
--@include shared/ring.lua
--@include shared/reply.lua
--@include acquire/general.lua
