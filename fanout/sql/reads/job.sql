-- One job, whole. $1 id, $2 tenant (NULL: any).
SELECT id, tenant, parent_id, root_id, follows_id, follows_generation, kind, status, verdict, document_key, idempotency_key, on_closed,
       depth, priority, attempt, failures, deaths, max_retries, generation, total, completed, failed, cancelled,
       paused, concurrency, deadline, run_at, created_at, claimed_at, updated_at, finished_at, lease_expires_at, claim_token,
       payload::text AS payload, checkpoint::text AS checkpoint, result::text AS result, error, error_type, reason, sums::text AS sums,
       budget::text AS budget, closing, fail_after, fail_after_percent
  FROM fanout.job WHERE id = $1 AND ($2::text IS NULL OR tenant = $2)
