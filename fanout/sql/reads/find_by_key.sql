-- The job that holds an idempotency key. $1 key, $2 tenant.
SELECT id FROM fanout.job WHERE tenant = $2 AND idempotency_key = $1
