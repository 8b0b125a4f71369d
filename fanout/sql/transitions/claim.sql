-- pending -> processing, in bulk: due jobs of the kinds the worker serves, lower priority number first, then the oldest.
-- $1 kinds, $2 priorities, $3 floors (timestamptz, a row each: where the walk begins; -infinity is a full look),
-- $4 limit, $5 claim token, $6 lease, $7 how many of each row at most (fewer where handlers are slow: no hoarding).   No row: nothing is due. A row without an id: a job that must run alone is due,
-- since `suspect_age` seconds.
-- A floor keeps the walk out of a long dead prefix that an open transaction elsewhere holds back from vacuum.
WITH pick AS MATERIALIZED (
    SELECT due.id
      FROM unnest($1::text[], $2::smallint[], $3::timestamptz[], $7::int[]) AS w (kind, priority, floor, most)
     CROSS JOIN LATERAL (
           SELECT j.id FROM fanout.job j
            WHERE j.status = 'pending' AND j.deaths = 0 AND NOT j.paused AND j.partition IS NULL
              AND j.kind = w.kind AND j.priority = w.priority
              AND j.run_at <= statement_timestamp() AND j.run_at >= w.floor
            ORDER BY j.run_at, j.id LIMIT w.most FOR NO KEY UPDATE SKIP LOCKED) due
     LIMIT $4),
claimed AS (
    UPDATE fanout.job j
       SET status = 'processing', attempt = j.attempt + 1, claim_token = $5, claimed_at = clock_timestamp(),
           lease_expires_at = clock_timestamp() + $6::interval
      FROM pick
     WHERE j.id = pick.id
 RETURNING j.id, j.attempt, j.kind, j.depth, j.parent_id, j.root_id, j.document_key, j.deaths, j.failures, j.max_retries,
           j.total, j.priority, j.run_at, j.payload::text AS payload, j.checkpoint::text AS checkpoint)
SELECT *, NULL::float8 AS suspect_age FROM claimed
 UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
       extract(epoch FROM statement_timestamp() - min(s.run_at))::float8
  FROM (SELECT DISTINCT kind FROM unnest($1::text[]) AS k (kind)) AS k
 CROSS JOIN LATERAL (
       SELECT j.run_at FROM fanout.job j
        WHERE j.status = 'pending' AND j.deaths > 0 AND NOT j.paused AND j.kind = k.kind AND j.run_at <= statement_timestamp()
        ORDER BY j.run_at LIMIT 1) s
HAVING min(s.run_at) IS NOT NULL
