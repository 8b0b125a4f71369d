-- What counting needs: sums that know what was passed up, one place that says when a batch has failed, and a timeline
-- of attempts without holes.

ALTER TABLE fanout.job
    ADD COLUMN own_sums jsonb,   -- of a job with children: the part of `sums` that its own handler added
    ADD COLUMN told_sums jsonb;  -- of a job that was opened again: the part of `sums` that its parent has counted already

-- Two sums as one, name by name, exactly: jsonb keeps numbers as numeric. At most 32 names, so that the result always
-- fits into its column; those of the first argument stay.
CREATE FUNCTION fanout.add_sums(into_sums jsonb, more jsonb) RETURNS jsonb
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT jsonb_object_agg(s.name, s.amount)
      FROM (SELECT e.name, trim_scale(sum(e.amount)) AS amount
              FROM (SELECT key AS name, value::numeric AS amount, 0 AS later FROM jsonb_each_text(into_sums)
                     UNION ALL
                    SELECT key, value::numeric, 1 FROM jsonb_each_text(more)) e
             GROUP BY e.name ORDER BY min(e.later), e.name LIMIT 32) s
$$;

-- Why a batch with these counters and sums has failed; NULL: it has not. The percentage is judged once the total stands.
CREATE FUNCTION fanout.batch_failure(
    failed integer, total integer, sealed boolean, fail_after integer, fail_after_percent real, sums jsonb, budget jsonb
) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE
           WHEN failed >= fail_after
           THEN format('%s %s failed, fail_after is %s', failed, CASE failed WHEN 1 THEN 'child' ELSE 'children' END, fail_after)
           WHEN sealed AND failed > 0 AND failed::numeric * 100 >= fail_after_percent::numeric * total
           THEN format('%s of %s children failed, fail_after is %s %%', failed, total, fail_after_percent)
           WHEN jsonb_typeof(budget) = 'object'
           THEN (SELECT format('%s is %s, its budget is %s', b.key, sums ->> b.key, b.value)
                   FROM jsonb_each(budget) AS b
                  WHERE CASE jsonb_typeof(b.value) WHEN 'number' THEN (sums ->> b.key)::numeric >= b.value::text::numeric END
                  ORDER BY b.key LIMIT 1)
           END
$$;

REVOKE ALL ON FUNCTION fanout.add_sums(jsonb, jsonb) FROM PUBLIC;
REVOKE ALL ON FUNCTION fanout.batch_failure(integer, integer, boolean, integer, real, jsonb, jsonb) FROM PUBLIC;

-- The run of a manager that ended well is kept too: its row's finished_at is when the last child ended.
ALTER TABLE fanout.attempt
    DROP CONSTRAINT attempt_outcome_check,
    ADD CONSTRAINT attempt_outcome CHECK (outcome IN ('completed', 'retry', 'failed', 'released', 'lost', 'cancelled'));

CREATE OR REPLACE VIEW fanout.attempts AS
SELECT job_id, attempt, started_at, ended_at, worker_id, outcome, error_type, error FROM fanout.attempt
UNION ALL
SELECT j.id, j.attempt, j.claimed_at, j.finished_at, COALESCE(j.claim_token, j.ended_by),
       CASE WHEN j.status = 'processing' THEN 'running' ELSE 'completed' END, NULL, NULL
  FROM fanout.job j
 WHERE j.attempt > 0 AND (j.status = 'processing' OR (j.status = 'completed' AND j.total = 0));
