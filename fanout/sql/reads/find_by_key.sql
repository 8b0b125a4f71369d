-- The job that holds an idempotency key. $1 key.
SELECT id FROM fanout.job WHERE idempotency_key = $1
