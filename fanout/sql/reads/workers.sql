-- The workers that live, and those that were lost within the last day.
SELECT id, name, host, pid, version, kinds, concurrency, running, greatest(0, concurrency - running) AS free,
       started_at, last_beat_at, free_since,
       CASE WHEN last_beat_at < statement_timestamp() - lease THEN 'lost' ELSE state END AS state,
       extract(epoch FROM statement_timestamp() - last_beat_at)::float8 AS beat_age_seconds
  FROM fanout.worker ORDER BY name, started_at
