-- What workers have said of the kinds they serve, and how many of them live.
SELECT k.name, k.max_retries, k.timeout_seconds, k.on_closed, k.payload_schema::text AS payload_schema,
       (SELECT count(*)::int FROM fanout.worker w
         WHERE k.name = ANY (w.kinds) AND w.last_beat_at > statement_timestamp() - w.lease) AS workers
  FROM fanout.kind k ORDER BY k.name
