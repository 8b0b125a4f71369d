-- All limits: what the code and what an operator says, how many use one, how many wait. $1 a name (NULL: all).
-- Jobs that wait for a limit of their kind are those that are due, up to 10,000.
SELECT l.name, l.concurrency, l.per_partition, l.requests_per_minute, l.weight_per_minute, l.burst,
       l.code::text AS code, l.operator::text AS operator,
       CASE WHEN l.kind IS NULL
            THEN (SELECT count(*) FROM fanout.slot s JOIN fanout.job j ON j.id = s.job_id AND j.attempt = s.attempt
                                                                      AND j.claim_token = s.claim_token
                   WHERE s.limit_name = l.name AND s.granted_at IS NOT NULL)
            ELSE (SELECT count(*) FROM fanout.job j WHERE j.status = 'processing' AND j.kind = l.kind) END::int AS in_use,
       CASE WHEN l.kind IS NULL
            THEN (SELECT count(*) FROM fanout.slot s JOIN fanout.job j ON j.id = s.job_id AND j.attempt = s.attempt
                                                                      AND j.claim_token = s.claim_token
                   WHERE s.limit_name = l.name AND s.granted_at IS NULL)
            ELSE (SELECT count(*)
                    FROM (SELECT 1
                            FROM generate_series(0, 9) AS p (priority)
                           CROSS JOIN LATERAL (
                                 SELECT 1 FROM fanout.job j
                                  WHERE j.status = 'pending' AND j.deaths = 0 AND NOT j.paused AND j.partition IS NULL
                                    AND j.kind = l.kind AND j.priority = p.priority AND j.run_at <= statement_timestamp()
                                  LIMIT 10000) AS a
                           UNION ALL
                          (SELECT 1 FROM fanout.job j
                            WHERE j.status = 'pending' AND j.deaths = 0 AND NOT j.paused AND j.partition IS NOT NULL
                              AND j.kind = l.kind AND j.run_at <= statement_timestamp() LIMIT 10000)
                           LIMIT 10000) AS w) END::int AS waiting,
       greatest(0, extract(epoch FROM l.requests_at - statement_timestamp())
                   + 60 / l.requests_per_minute - greatest(COALESCE(l.burst, 1), 60 / l.requests_per_minute),
                extract(epoch FROM l.weight_at - statement_timestamp())
                   - CASE WHEN l.weight_per_minute IS NOT NULL THEN COALESCE(l.burst, 1) END)::float8 AS next_seconds
  FROM fanout.limits l
 WHERE left(l.name, 1) <> ':' AND ($1::text IS NULL OR l.name = $1)
 ORDER BY l.name
