-- Spliced in after born and before the tail, with asked (…, lease: NULL leaves it as it is; outside: without a claim) and
-- mine (…, attempt, claim_token): the parent has more children, and may have failed by those that are gone. What is said of p
-- here is said of the version that was locked, after its children were inserted: child level first, as everybody.
lc AS MATERIALIZED (
    SELECT p.id, k.born, k.gone, k.first_id, asked.lease, p.attempt, p.claimed_at, p.claim_token,
           CASE WHEN k.gone > 0 AND p.verdict IS NULL AND p.closing IS NULL
                 AND (p.fail_after IS NOT NULL OR p.fail_after_percent IS NOT NULL)
                THEN fanout.batch_failure(p.failed + k.gone, p.total + k.born, p.status = 'waiting',
                                          p.fail_after, p.fail_after_percent, NULL, NULL) END AS failure
      FROM k CROSS JOIN asked CROSS JOIN mine JOIN fanout.job p ON p.id = mine.id
     WHERE p.finished_at IS NULL AND p.verdict IS NULL
       AND (asked.outside OR (p.attempt = mine.attempt AND p.claim_token IS NOT DISTINCT FROM mine.claim_token))
       FOR NO KEY UPDATE OF p),
c AS (
    UPDATE fanout.job p
       SET total = p.total + lc.born,
           failed = p.failed + CASE WHEN p.closing IS NULL THEN lc.gone ELSE 0 END, updated_at = clock_timestamp(),
           -- Until it has children, all that it added is its own.
           own_sums = CASE WHEN p.total = 0 AND lc.born > 0 THEN p.sums ELSE p.own_sums END,
           lease_expires_at = CASE WHEN lc.failure IS NULL THEN COALESCE(clock_timestamp() + lc.lease, p.lease_expires_at) END,
           claim_token = CASE WHEN lc.failure IS NULL THEN p.claim_token END,
           reason = COALESCE(lc.failure, p.reason),
           verdict = CASE WHEN lc.failure IS NOT NULL
                               AND p.completed + p.failed + p.cancelled + lc.gone < p.total + lc.born THEN 'failed' ELSE p.verdict END,
           status = CASE WHEN lc.failure IS NULL THEN p.status
                         WHEN p.completed + p.failed + p.cancelled + lc.gone < p.total + lc.born THEN 'waiting' ELSE 'failed' END,
           finished_at = CASE WHEN lc.failure IS NOT NULL
                                   AND p.completed + p.failed + p.cancelled + lc.gone >= p.total + lc.born
                              THEN clock_timestamp() END
      FROM lc WHERE p.id = lc.id
 RETURNING p.id, p.parent_id, p.depth, p.kind, p.status, p.finished_at, p.generation, p.on_closed, p.webhook, p.priority,
           p.total, p.completed, p.failed, p.cancelled, p.sums, p.told_sums, p.paused, p.concurrency, lc.born,
           lc.first_id, lc.failure),
kept AS (   -- the manager was still dispatching
    INSERT INTO fanout.attempt (job_id, attempt, started_at, worker_id, outcome, error)
    SELECT id, attempt, claimed_at, claim_token, 'cancelled', failure
      FROM lc WHERE failure IS NOT NULL AND claim_token IS NOT NULL ON CONFLICT DO NOTHING),
