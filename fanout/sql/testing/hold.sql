-- Nobody claims, or ends, a job that is open now until this transaction is over.
SELECT id FROM fanout.job WHERE finished_at IS NULL ORDER BY id FOR UPDATE
