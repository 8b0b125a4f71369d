-- Numbers and stores batches of events, one for each stream, in one commit.
-- $1 stream ids (ascending, each once), $2 counts, $3 bodies, $4 batch numbers, $5 writer; the claims that speak in them:
-- $6 stream ids, $7 job ids, $8 attempts.
-- A batch that is sent again, for its answer was lost, is found, not written. A stream without a row has ended.
-- If the first try commits just now, the unique index refuses this one: call again.
WITH i AS (
    SELECT * FROM unnest($1::bigint[], $2::int[], $3::bytea[], $4::bigint[]) AS i (stream_id, count, body, batch)),
late AS (
    SELECT l.stream_id, array_agg(l.job_id) AS jobs
      FROM unnest($6::bigint[], $7::bigint[], $8::int[]) AS l (stream_id, job_id, attempt)
      JOIN fanout.job j ON j.id = l.job_id AND j.attempt <> l.attempt GROUP BY l.stream_id),
earlier AS MATERIALIZED (
    SELECT i.stream_id, b.first_number, b.late, b.mark
      FROM i JOIN fanout.event_batch b ON b.writer = $5 AND b.batch = i.batch AND b.stream_id = i.stream_id),
head AS MATERIALIZED (
    SELECT s.stream_id, s.mark FROM fanout.stream s JOIN i ON i.stream_id = s.stream_id
     WHERE NOT s.closed AND NOT EXISTS (SELECT 1 FROM earlier e WHERE e.stream_id = s.stream_id)
     ORDER BY s.stream_id FOR NO KEY UPDATE OF s),
numbered AS (
    UPDATE fanout.stream s SET last_number = s.last_number + i.count, updated_at = clock_timestamp(),
                               mark = hashint8extended(i.batch, uuid_hash_extended($5, s.mark))
      FROM head JOIN i ON i.stream_id = head.stream_id
     WHERE s.stream_id = head.stream_id
 RETURNING s.stream_id, s.generation, s.last_number - i.count + 1 AS first_number, i.count, i.body, i.batch,
           s.mark, head.mark AS mark_before),
stored AS (
    INSERT INTO fanout.event_batch (stream_id, first_number, count, writer, batch, late, body, mark)
    SELECT n.stream_id, n.first_number, n.count, $5, n.batch, late.jobs, n.body, n.mark
      FROM numbered n LEFT JOIN late ON late.stream_id = n.stream_id),
done AS (
    SELECT n.stream_id, n.generation, n.first_number, late.jobs AS late, n.mark, n.mark_before
      FROM numbered n LEFT JOIN late ON late.stream_id = n.stream_id
     UNION ALL
    SELECT e.stream_id, s.generation, e.first_number, e.late, e.mark,
           COALESCE((SELECT b.mark FROM fanout.event_batch b WHERE b.stream_id = e.stream_id AND b.first_number < e.first_number
                      ORDER BY b.first_number DESC LIMIT 1), 0)
      FROM earlier e JOIN fanout.stream s ON s.stream_id = e.stream_id)
SELECT d.stream_id, d.generation, d.first_number, d.late, d.mark, d.mark_before,
       EXISTS (SELECT 1 FROM fanout.stream_watch w
                WHERE w.stream_id = d.stream_id AND w.expires_at > statement_timestamp()) AS watched
  FROM done d
