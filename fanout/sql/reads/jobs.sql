-- Root jobs, newest first, by keyset. $1 kind (NULL: any), $2 status (NULL: any), $3 ids below this one (NULL: from the newest), $4 limit,
-- $5 tenant (NULL: any).
SELECT id, kind, status, verdict, idempotency_key, total, completed, failed, cancelled, generation, follows_id,
       paused, created_at, updated_at, finished_at, error, reason
  FROM fanout.job
 WHERE parent_id IS NULL AND ($1::text IS NULL OR kind = $1) AND ($2::text IS NULL OR status = $2)
   AND ($3::bigint IS NULL OR id < $3) AND ($5::text IS NULL OR tenant = $5)
 ORDER BY id DESC LIMIT $4
