-- pending -> processing, in bulk: due jobs of the kinds the worker serves, lower priority number first, then the oldest.
-- $1 kinds, $2 priorities, $3 floors (timestamptz, a row each: where the walk begins; -infinity is a full look),
-- $4 limit, $5 claim token, $6 lease, $7 how many of each row at most (fewer where handlers are slow: no hoarding),
-- $8 how many come first because they have been due for longer than their priority times $9 (interval),
-- $10 are partitions looked for?
-- No row: nothing is due. A row without an id: a job that must run alone is due, since `suspect_age` seconds; jobs of
-- the kinds `limited` are due, but are under a limit or have a partition: `claim_limited` takes them.
-- A floor keeps the walk out of a long dead prefix that an open transaction elsewhere holds back from vacuum.
WITH w AS MATERIALIZED (
    SELECT *, kind = ANY (ARRAY(SELECT l.kind FROM fanout.limits l
                                 WHERE l.kind IS NOT NULL AND (l.concurrency IS NOT NULL OR l.per_partition IS NOT NULL)))
              AS is_limited
      FROM unnest($1::text[], $2::smallint[], $3::timestamptz[], $7::int[]) AS w (kind, priority, floor, most)),
pick AS MATERIALIZED (
    SELECT id FROM (
        SELECT aged.id FROM (
            SELECT due.id
              FROM (SELECT kind, priority FROM w WHERE $8::int > 0 AND priority > 0 AND NOT is_limited ORDER BY random()) AS w
             CROSS JOIN LATERAL (
                   SELECT j.id FROM fanout.job j
                    WHERE j.status = 'pending' AND j.deaths = 0 AND NOT j.paused AND j.partition IS NULL
                      AND j.kind = w.kind AND j.priority = w.priority
                      AND j.run_at <= statement_timestamp() - w.priority * $9::interval
                    ORDER BY j.run_at, j.id LIMIT $8 FOR NO KEY UPDATE SKIP LOCKED) due
             LIMIT $8) AS aged
         UNION ALL
        SELECT due.id
          FROM w
         CROSS JOIN LATERAL (
               SELECT j.id FROM fanout.job j
                WHERE j.status = 'pending' AND j.deaths = 0 AND NOT j.paused AND j.partition IS NULL
                  AND j.kind = w.kind AND j.priority = w.priority
                  AND j.run_at <= statement_timestamp() AND j.run_at >= w.floor
                ORDER BY j.run_at, j.id LIMIT w.most FOR NO KEY UPDATE SKIP LOCKED) due
         WHERE NOT w.is_limited) AS next
     LIMIT $4),
claimed AS (
    UPDATE fanout.job j
       SET status = 'processing', attempt = j.attempt + 1, claim_token = $5, claimed_at = clock_timestamp(),
           lease_expires_at = clock_timestamp() + $6::interval
      FROM pick
     WHERE j.id = pick.id
 RETURNING j.id, j.attempt, j.kind, j.depth, j.parent_id, j.root_id, j.document_key, j.deaths, j.failures, j.max_retries,
           j.total, j.priority, j.run_at, j.payload::text AS payload, j.checkpoint::text AS checkpoint),
told AS (
    SELECT (SELECT extract(epoch FROM statement_timestamp() - min(s.run_at))::float8
              FROM (SELECT DISTINCT kind FROM w) AS k
             CROSS JOIN LATERAL (
                   SELECT j.run_at FROM fanout.job j
                    WHERE j.status = 'pending' AND j.deaths > 0 AND NOT j.paused AND j.kind = k.kind
                      AND j.run_at <= statement_timestamp()
-- include room
                    ORDER BY j.run_at LIMIT 1) s) AS suspect_age,
           (SELECT array_agg(k.kind)
              FROM (SELECT kind, bool_or(is_limited) AS is_limited FROM w GROUP BY kind) AS k
             WHERE (k.is_limited AND EXISTS (
                      SELECT 1 FROM w CROSS JOIN LATERAL (
                             SELECT 1 FROM fanout.job j
                              WHERE j.status = 'pending' AND j.deaths = 0 AND NOT j.paused AND j.partition IS NULL
                                AND j.kind = w.kind AND j.priority = w.priority
                                AND j.run_at <= statement_timestamp() AND j.run_at >= w.floor LIMIT 1) due
                       WHERE w.kind = k.kind))
                OR ($10::boolean AND EXISTS (
                      SELECT 1 FROM fanout.job j
                       WHERE j.status = 'pending' AND j.deaths = 0 AND NOT j.paused AND j.partition IS NOT NULL
                         AND j.kind = k.kind))) AS limited)
SELECT *, NULL::float8 AS suspect_age, NULL::text[] AS limited FROM claimed
 UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, suspect_age, limited
  FROM told WHERE suspect_age IS NOT NULL OR limited IS NOT NULL
