-- The locks under which jobs are claimed that stand under a limit: of the limits of $1 kinds, and of partitions.
-- By name, so that two who lock several do not deadlock. Decide in the next statement: it sees what was committed
-- while this one waited. A process that is stopped in mid-transaction must not stop all others for long.
-- A bitmap scan never marks dead entries of an index: what runs would be looked for among all that ran since a vacuum.
SELECT l.kind, set_config('idle_in_transaction_session_timeout', '3000', true), set_config('enable_bitmapscan', 'off', true)
  FROM (SELECT kind, name FROM fanout.limits
         WHERE name = ':partitions' OR name IN (SELECT 'kind:' || k FROM unnest($1::text[]) AS k)
         ORDER BY name FOR NO KEY UPDATE) AS l
