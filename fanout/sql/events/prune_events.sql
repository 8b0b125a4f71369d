-- Some of the oldest batches beyond the retention, of any stream; their heads say from where on events are left.
-- $1 retention, $2 most batches.   Returns how many went.
WITH old AS MATERIALIZED (
    SELECT b.stream_id, b.first_number, b.count FROM fanout.event_batch b
     WHERE b.at < statement_timestamp() - $1::interval ORDER BY b.at LIMIT $2 FOR UPDATE SKIP LOCKED),
head AS MATERIALIZED (
    SELECT s.stream_id, max(old.first_number + old.count) AS next
      FROM (SELECT s.stream_id FROM fanout.stream s WHERE s.stream_id IN (SELECT stream_id FROM old)
             ORDER BY s.stream_id FOR NO KEY UPDATE) s
      JOIN old ON old.stream_id = s.stream_id GROUP BY s.stream_id),
moved AS (
    UPDATE fanout.stream s SET first_number = greatest(s.first_number, head.next) FROM head WHERE s.stream_id = head.stream_id
    RETURNING 1),
gone AS (
    DELETE FROM fanout.event_batch b USING old
     WHERE b.stream_id = old.stream_id AND b.first_number = old.first_number RETURNING 1)
SELECT (SELECT count(*) FROM gone)::int AS gone, (SELECT count(*) FROM moved)::int AS streams
