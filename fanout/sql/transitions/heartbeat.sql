-- processing -> processing, leaves: renews the leases of all claims of a worker. Never waits for a locked row.
-- $1 ids, $2 attempts, $3 claim token, $4 lease.   Returns the ids that are `lost` (a row that is only locked is not), and
-- those that have children by now, added from outside: their rows are locked too often for this (heartbeat_manager).
WITH i AS (SELECT * FROM unnest($1::bigint[], $2::int[]) AS i (id, attempt)),
l AS MATERIALIZED (
    SELECT i.id FROM i CROSS JOIN LATERAL (
           SELECT 1 FROM fanout.job j
            WHERE j.id = i.id AND j.attempt = i.attempt AND j.claim_token = $3
              FOR NO KEY UPDATE OF j SKIP LOCKED) x),
u AS (
    UPDATE fanout.job j SET lease_expires_at = clock_timestamp() + $4::interval FROM l WHERE j.id = l.id)
SELECT i.id, j.id IS NULL AS lost
  FROM i LEFT JOIN fanout.job j ON j.id = i.id AND j.attempt = i.attempt AND j.claim_token = $3
 WHERE j.id IS NULL OR j.total > 0
