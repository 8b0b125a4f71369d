-- Give slots to those who wait, in a transaction that holds the locks of `lock_slots`: never more than the limit, to
-- whose turn it is (the partition, or else the batch, that uses the fewest), and of those who has waited longest.
-- $1 claim token, $2 names.   Rows of this worker's slots, granted or not; and one a name, without a job: in how many
-- seconds the rate allows the next one, and which other workers were given a slot here.
-- Rates are smooth (GCRA): `requests_at` is when the requests so far were due at the steady rate; the next one may come
-- when that is no more than the burst ahead. The first of those that may not come yet holds up all behind it.
WITH l AS MATERIALIZED (
    SELECT name, concurrency, per_partition, 60 / requests_per_minute AS per_request, 60 / weight_per_minute AS per_weight,
           COALESCE(burst, 1) AS burst,
           COALESCE(greatest(0, extract(epoch FROM requests_at - statement_timestamp())), 0)::float8 AS request_debt,
           COALESCE(greatest(0, extract(epoch FROM weight_at - statement_timestamp())), 0)::float8 AS weight_debt
      FROM fanout.limits WHERE name = ANY ($2::text[])),
s AS MATERIALIZED (SELECT * FROM fanout.slot WHERE limit_name = ANY ($2::text[])),
in_lane AS (
    SELECT w.limit_name, w.job_id, w.attempt, w.number, w.claim_token, w.partition, w.asked_at, w.weight,
           row_number() OVER (PARTITION BY w.limit_name, w.lane ORDER BY w.asked_at, w.job_id, w.number)
             + COALESCE(u.n, 0) AS of_lane
      FROM s w
      LEFT JOIN (SELECT limit_name, lane, count(*) AS n FROM s WHERE granted_at IS NOT NULL GROUP BY limit_name, lane) AS u
             ON u.limit_name = w.limit_name AND u.lane = w.lane
     WHERE w.granted_at IS NULL),
in_partition AS (
    SELECT w.*,
           row_number() OVER (PARTITION BY w.limit_name, w.partition ORDER BY w.of_lane, w.asked_at, w.job_id, w.number)
             + COALESCE(u.n, 0) AS of_partition
      FROM in_lane w
      LEFT JOIN (SELECT limit_name, partition, count(*) AS n FROM s
                  WHERE granted_at IS NOT NULL GROUP BY limit_name, partition) AS u
             ON u.limit_name = w.limit_name AND u.partition = w.partition),
in_line AS (
    SELECT w.*, l.concurrency, l.per_request, l.per_weight, l.burst, l.request_debt, l.weight_debt,
           row_number() OVER line AS place, sum(w.weight) OVER line AS weights,
           (SELECT count(*) FROM s WHERE s.limit_name = w.limit_name AND s.granted_at IS NOT NULL) AS used
      FROM in_partition w JOIN l ON l.name = w.limit_name
     WHERE l.per_partition IS NULL OR w.of_partition <= l.per_partition
    WINDOW line AS (PARTITION BY w.limit_name ORDER BY w.of_lane, w.asked_at, w.job_id, w.number)),
judged AS MATERIALIZED (   -- a billionth of a second: a sum of seconds is not exact
    SELECT *, COALESCE(greatest(request_debt + place * per_request - greatest(burst, per_request),
                                weight_debt + weights * per_weight - greatest(burst, weight * per_weight)), 0) AS wait_seconds
      FROM in_line WHERE concurrency IS NULL OR used + place <= concurrency),
given AS MATERIALIZED (SELECT * FROM judged WHERE wait_seconds <= 1e-9),
granted AS (
    UPDATE fanout.slot t SET granted_at = statement_timestamp()
      FROM given g
     WHERE t.limit_name = g.limit_name AND t.job_id = g.job_id AND t.attempt = g.attempt AND t.number = g.number),
counted AS (
    UPDATE fanout.limits t
       SET requests_at = greatest(t.requests_at, statement_timestamp()) + make_interval(secs => COALESCE(g.n * l.per_request, 0)),
           weight_at = greatest(t.weight_at, statement_timestamp()) + make_interval(secs => COALESCE(g.weights * l.per_weight, 0))
      FROM (SELECT limit_name, count(*) AS n, sum(weight) AS weights FROM given GROUP BY limit_name) AS g
      JOIN l ON l.name = g.limit_name
     WHERE t.name = g.limit_name AND (l.per_request IS NOT NULL OR l.per_weight IS NOT NULL))
SELECT s.limit_name, s.job_id, s.attempt, s.number, s.granted_at IS NOT NULL OR g.job_id IS NOT NULL AS granted,
       NULL::float8 AS wait_seconds, NULL::uuid[] AS others
  FROM s
  LEFT JOIN given g ON g.limit_name = s.limit_name AND g.job_id = s.job_id AND g.attempt = s.attempt AND g.number = s.number
 WHERE s.claim_token = $1
 UNION ALL
SELECT l.name, NULL, NULL, NULL, NULL,
       (SELECT min(j.wait_seconds) FROM judged j WHERE j.limit_name = l.name AND j.wait_seconds > 1e-9),
       ARRAY(SELECT DISTINCT g.claim_token FROM given g WHERE g.limit_name = l.name AND g.claim_token <> $1)
  FROM l
