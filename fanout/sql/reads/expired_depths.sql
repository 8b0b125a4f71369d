-- The depths at which leases have run out, deepest first: what rescue has to be called with.
SELECT depth FROM fanout.job
 WHERE status = 'processing' AND lease_expires_at < statement_timestamp() GROUP BY depth ORDER BY depth DESC
