-- Jobs whose leases have run out, at one depth, by keyset. $1 depth, $2 ids above this one, $3 limit.
SELECT id FROM fanout.job
 WHERE status = 'processing' AND lease_expires_at < statement_timestamp() AND depth = $1 AND id > $2
 ORDER BY id LIMIT $3
