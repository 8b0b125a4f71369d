-- The locks of named limits, $1: whatever is done to their slots is done under them. By name: two who lock several do
-- not deadlock. Decide in the next statement: it sees what was committed while this one waited. A process that is
-- stopped in mid-transaction must not stop all others for long.
-- No bitmap scan, as in `lock_limits`.
SELECT l.name, set_config('idle_in_transaction_session_timeout', '3000', true), set_config('enable_bitmapscan', 'off', true)
  FROM (SELECT name FROM fanout.limits WHERE name = ANY ($1::text[]) ORDER BY name FOR NO KEY UPDATE) AS l
