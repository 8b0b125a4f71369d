-- What this is: versions, and how many workers live.
SELECT current_setting('server_version') AS server_version,
       (SELECT COALESCE(max(version), 0) FROM fanout.migration) AS schema_version,
       (SELECT count(*)::int FROM fanout.worker w WHERE w.last_beat_at > statement_timestamp() - w.lease) AS live_workers
