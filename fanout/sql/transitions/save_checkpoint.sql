-- processing -> processing: keeps what this attempt has already paid for.
-- $1 id, $2 attempt, $3 claim token, $4 checkpoint.   No row: lost.
UPDATE fanout.job SET checkpoint = $4::text::json
 WHERE id = $1 AND attempt = $2 AND claim_token = $3
RETURNING id
