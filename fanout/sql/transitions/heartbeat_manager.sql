-- processing -> processing, ONE job that fans out: its row is where its children are counted, so it is locked most of
-- the time. This waits, and holds nothing meanwhile.
-- $1 id, $2 attempt, $3 claim token, $4 lease.   No row: lost.
UPDATE fanout.job SET lease_expires_at = clock_timestamp() + $4::interval
 WHERE id = $1 AND attempt = $2 AND claim_token = $3
RETURNING id
