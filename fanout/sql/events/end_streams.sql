-- The last event of streams, once each, and only where the root job has ended. $1 stream ids (ascending, each once),
-- $2 writer, $3 batch numbers.
-- FOR SHARE waits for whoever opens the job again, and then finds it open: a stream must not end beside a running job.
-- A stream without a row: it has its end already, its job is open, or it never had a head. Most never have: no job is
-- locked for those.
WITH i AS (SELECT * FROM unnest($1::bigint[], $3::bigint[]) AS i (stream_id, batch)),
ended AS MATERIALIZED (
    SELECT j.id, j.status, j.generation, j.total, j.completed, j.failed, j.cancelled,
           left(COALESCE(j.reason, j.error), 500) AS reason, j.finished_at, i.batch
      FROM i JOIN fanout.stream s ON s.stream_id = i.stream_id AND NOT s.closed JOIN fanout.job j ON j.id = i.stream_id
     WHERE j.finished_at IS NOT NULL ORDER BY j.id FOR SHARE OF j),
head AS MATERIALIZED (
    SELECT s.stream_id, s.mark, ended.batch FROM ended JOIN fanout.stream s ON s.stream_id = ended.id
     WHERE NOT s.closed ORDER BY s.stream_id FOR NO KEY UPDATE OF s),
numbered AS (
    UPDATE fanout.stream s SET last_number = s.last_number + 1, closed = true, updated_at = clock_timestamp(),
                               mark = hashint8extended(head.batch, uuid_hash_extended($2, s.mark))
      FROM head WHERE s.stream_id = head.stream_id
 RETURNING s.stream_id, s.generation, s.last_number, s.mark, head.mark AS mark_before),
body AS (
    SELECT ended.id, ended.batch,
           json_build_object('type', 'end', 'at', round(extract(epoch FROM ended.finished_at) * 1000), 'job', ended.id,
                             'outcome', CASE WHEN ended.status = 'completed' AND ended.failed > 0
                                             THEN 'completed with failures' ELSE ended.status END,
                             'generation', ended.generation, 'total', ended.total, 'completed', ended.completed,
                             'failed', ended.failed, 'cancelled', ended.cancelled, 'reason', ended.reason)::text AS body
      FROM ended),
stored AS (
    INSERT INTO fanout.event_batch (stream_id, first_number, count, writer, batch, body, mark)
    SELECT n.stream_id, n.last_number, 1, $2, body.batch, convert_to(body.body, 'UTF8'), n.mark
      FROM numbered n JOIN body ON body.id = n.stream_id)
SELECT n.stream_id, n.generation, n.last_number AS first_number, body.body, n.mark, n.mark_before,
       EXISTS (SELECT 1 FROM fanout.stream_watch w
                WHERE w.stream_id = n.stream_id AND w.expires_at > statement_timestamp()) AS watched
  FROM numbered n JOIN body ON body.id = n.stream_id
