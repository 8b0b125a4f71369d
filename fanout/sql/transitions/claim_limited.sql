-- pending -> processing, of jobs that stand under the limit of their kind, or have a partition: at most what is left,
-- turn by turn between partitions, those with the least running first. Within one: by priority, then the oldest.
-- $1 kinds, $2 priorities, $3 floors (as in `claim`; for jobs without a partition), $4 limit, $5 claim token, $6 lease;
-- $7 the kinds once each, $8 how many of each may be held ahead of free slots, $9 behind which partition the walk
-- begins; $10 kinds whose limits are locked, $11 free slots, $12 how many of a kind come first because they have been
-- due for longer than their priority times $13 (interval); $14 how many of a partition and priority to look at (NULL: all).
-- Run it in a transaction that holds the locks of `lock_limits`. A row without an id: more partitions of `kind` wait
-- behind `partition`.
-- It counts rows that are processing, so a slot cannot leak; and reads candidates without a lock: who holds the limits
-- has no rival, and what was paused, cancelled or moved meanwhile is seen where the rows are locked.
WITH RECURSIVE running AS MATERIALIZED (
    SELECT j.kind, j.partition, j.parent_id, count(*)::int AS n
      FROM fanout.job j WHERE j.status = 'processing' GROUP BY j.kind, j.partition, j.parent_id),
k AS MATERIALIZED (
    SELECT i.kind, i.ahead, i.behind, l.concurrency, l.per_partition, l.kind IS NOT NULL AS is_limited,
           (SELECT COALESCE(sum(r.n), 0) FROM running r WHERE r.kind = i.kind) AS used,
           (SELECT COALESCE(sum(r.n), 0) FROM running r WHERE r.kind = i.kind AND r.partition IS NULL) AS used_of_none
      FROM unnest($7::text[], $8::int[], $9::text[]) AS i (kind, ahead, behind)
      LEFT JOIN fanout.limits l ON l.kind = i.kind AND l.kind IS NOT NULL
                               AND (l.concurrency IS NOT NULL OR l.per_partition IS NOT NULL)
     WHERE l.kind IS NULL OR l.kind = ANY ($10::text[])),
batch AS MATERIALIZED (   -- those with a limit of their own of which some run
    SELECT r.parent_id AS id, r.n, p.concurrency
      FROM (SELECT parent_id, sum(n) AS n FROM running WHERE parent_id IS NOT NULL GROUP BY parent_id) AS r
      JOIN fanout.job p ON p.id = r.parent_id AND p.concurrency IS NOT NULL),
lane (kind, until, partition, priority, n) AS (   -- a loose walk: two look-ups a partition, however much waits in it
    SELECT s.kind, s.until, f.partition, f.priority, 1
      FROM (SELECT kind, behind, NULL AS until FROM k
             UNION ALL
            SELECT kind, '', behind FROM k WHERE behind <> '') AS s
     CROSS JOIN LATERAL (
           SELECT j.partition, j.priority FROM fanout.job j
            WHERE j.status = 'pending' AND j.deaths = 0 AND NOT j.paused AND j.partition IS NOT NULL
              AND j.kind = s.kind AND j.partition > s.behind
            ORDER BY j.partition, j.priority LIMIT 1) f
     WHERE s.until IS NULL OR f.partition <= s.until
     UNION ALL
    SELECT l.kind, l.until, f.partition, f.priority, l.n + 1
      FROM lane l
     CROSS JOIN LATERAL (
           SELECT j.partition, j.priority FROM fanout.job j
            WHERE j.status = 'pending' AND j.deaths = 0 AND NOT j.paused AND j.partition IS NOT NULL
              AND j.kind = l.kind AND (j.partition, j.priority) > (l.partition, l.priority)
            ORDER BY j.partition, j.priority LIMIT 1) f
     WHERE l.n < 250 AND (l.until IS NULL OR f.partition <= l.until)),
line AS MATERIALIZED (   -- a map: no join of many to many is quick without an index
    SELECT l.kind, l.partition, l.priority, u.used
      FROM lane l
      JOIN k ON k.kind = l.kind
     CROSS JOIN LATERAL (
           SELECT COALESCE(((SELECT jsonb_object_agg(kind || ':' || partition, n)
                               FROM (SELECT kind, partition, sum(n) AS n FROM running
                                      WHERE partition IS NOT NULL GROUP BY kind, partition) AS r)
                            ->> (l.kind || ':' || l.partition))::int, 0) AS used) AS u
     WHERE (k.per_partition IS NULL OR u.used < k.per_partition)
       AND (k.concurrency IS NULL OR k.used < k.concurrency)),   -- or what cannot be chosen has the places of a batch
candidate AS MATERIALIZED (   -- the more partitions there are, the fewer of each
    SELECT l.kind, l.partition, l.priority, l.used, c.id, c.parent_id, c.run_at
      FROM line l
     CROSS JOIN LATERAL (
           SELECT d.id, d.parent_id, d.run_at
             FROM (SELECT j.id, j.parent_id, j.run_at FROM fanout.job j
                    WHERE j.status = 'pending' AND j.deaths = 0 AND NOT j.paused AND j.partition IS NOT NULL
                      AND j.kind = l.kind AND j.partition = l.partition AND j.priority = l.priority
                      AND j.run_at <= statement_timestamp()
                    ORDER BY j.run_at, j.id LIMIT $14) AS d   -- all that a full batch has there would be walked every time
            WHERE (d.parent_id = ANY (ARRAY(SELECT id FROM batch WHERE n >= concurrency))) IS NOT TRUE
            ORDER BY d.run_at, d.id
            LIMIT least($4::bigint, (SELECT greatest(1, 4 * $4 / greatest(1, count(*))) FROM line))) c
     UNION ALL
    SELECT w.kind, NULL, w.priority, k.used_of_none, c.id, c.parent_id, c.run_at
      FROM unnest($1::text[], $2::smallint[], $3::timestamptz[]) AS w (kind, priority, floor)
      JOIN k ON k.kind = w.kind AND k.is_limited AND (k.concurrency IS NULL OR k.used < k.concurrency)
     CROSS JOIN LATERAL (
           SELECT j.id, j.parent_id, j.run_at FROM fanout.job j
            WHERE j.status = 'pending' AND j.deaths = 0 AND NOT j.paused AND j.partition IS NULL
              AND j.kind = w.kind AND j.priority = w.priority AND j.run_at <= statement_timestamp() AND j.run_at >= w.floor
            ORDER BY j.run_at, j.id LIMIT $4) c),
aged AS (
    SELECT c.*, $12::int > 0 AND c.priority > 0 AND c.run_at <= statement_timestamp() - c.priority * $13::interval AS is_aged
      FROM candidate c),
of_batches AS MATERIALIZED (   -- limits of batches, looked up once each
    SELECT (SELECT jsonb_object_agg(id, n) FROM batch) AS used,
           (SELECT jsonb_object_agg(p.id, p.concurrency)
              FROM (SELECT DISTINCT parent_id FROM candidate WHERE parent_id IS NOT NULL) AS c
              JOIN fanout.job p ON p.id = c.parent_id AND p.concurrency IS NOT NULL) AS most),
in_batch AS (
    SELECT c.*, (b.most ->> c.parent_id::text)::int AS batch_most,
           row_number() OVER (PARTITION BY c.parent_id ORDER BY c.is_first DESC, c.priority, c.run_at, c.id)
             + COALESCE((b.used ->> c.parent_id::text)::int, 0) AS of_batch
      FROM (SELECT a.*, a.is_aged AND $12 >= row_number() OVER (PARTITION BY a.kind, a.is_aged ORDER BY a.run_at, a.id)
                        AS is_first
              FROM aged a) AS c
     CROSS JOIN of_batches b),
in_partition AS (
    SELECT c.*,
           row_number() OVER (PARTITION BY c.kind, c.partition ORDER BY c.is_first DESC, c.priority, c.run_at, c.id)
             + c.used AS of_partition
      FROM in_batch c
     WHERE c.batch_most IS NULL OR c.of_batch <= c.batch_most),
in_kind AS (
    SELECT c.id, c.is_first, k.concurrency, k.ahead, k.used,
           bool_or(c.batch_most IS NOT NULL OR k.per_partition IS NOT NULL) OVER (PARTITION BY c.kind) AS is_scarce,
           row_number() OVER (PARTITION BY c.kind ORDER BY c.is_first DESC, c.of_partition, c.priority, c.run_at, c.id) AS of_kind
      FROM in_partition c
      JOIN k ON k.kind = c.kind
     WHERE k.per_partition IS NULL OR c.of_partition <= k.per_partition),
chosen AS MATERIALIZED (   -- held ahead of free slots is only what brings the use to half of the limit
    SELECT id FROM in_kind
     WHERE of_kind <= CASE WHEN concurrency IS NULL THEN $11::int + CASE WHEN is_scarce THEN 0 ELSE ahead END
                           ELSE least(concurrency - used,
                                      greatest($11, CASE WHEN is_scarce THEN 0
                                                         ELSE least($11 + ahead, concurrency / 2 - used) END)) END
     ORDER BY is_first DESC, of_kind LIMIT $4),
pick AS MATERIALIZED (
    SELECT l.id
      FROM (SELECT id FROM chosen ORDER BY id) AS c
     CROSS JOIN LATERAL (   -- pending, said so that no partial index can be taken for the primary key
           SELECT j.id FROM fanout.job j
            WHERE j.id = c.id AND j.claim_token IS NULL AND j.finished_at IS NULL AND j.status IS DISTINCT FROM 'waiting'
              AND j.paused IS FALSE AND j.deaths < 1 AND j.run_at <= statement_timestamp()
              FOR NO KEY UPDATE SKIP LOCKED) l),
claimed AS (
    UPDATE fanout.job j
       SET status = 'processing', attempt = j.attempt + 1, claim_token = $5, claimed_at = clock_timestamp(),
           lease_expires_at = clock_timestamp() + $6::interval
      FROM pick
     WHERE j.id = pick.id
 RETURNING j.id, j.attempt, j.kind, j.depth, j.parent_id, j.root_id, j.document_key, j.deaths, j.failures, j.max_retries,
           j.total, j.priority, j.run_at, j.payload::text AS payload, j.checkpoint::text AS checkpoint, j.partition)
SELECT * FROM claimed
 UNION ALL
SELECT NULL, NULL, kind, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, max(partition)
  FROM lane WHERE n = 250 AND until IS NULL GROUP BY kind
