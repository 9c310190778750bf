-- The stamp is the server time, in ms, after which the caller no longer waits for this call, with a
-- nonce as its fraction. A call that a stalled server runs after that time must not charge anything.
-- (`not <=` rather than `>`, because every comparison with NaN is false.)
if not (now - stamp <= 0) then return {stamp, -2, now} end
