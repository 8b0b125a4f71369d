-- What is due or running, by kind: for people and metrics.
SELECT kind, status, count(*)::int AS n, min(run_at) AS oldest_run_at
  FROM fanout.job WHERE status IN ('pending', 'processing', 'waiting') GROUP BY kind, status ORDER BY kind, status
