-- Batches that were told to be stored, and are not: a fail-over lost them. $1 writer, $2 stream ids, $3 batch numbers, $4 the
-- first numbers that they were given. What was pruned, or went with its job, is not lost.
SELECT i.batch
  FROM unnest($2::bigint[], $3::bigint[], $4::bigint[]) AS i (stream_id, batch, first_number)
 WHERE NOT EXISTS (SELECT 1 FROM fanout.event_batch b WHERE b.writer = $1 AND b.batch = i.batch)
   AND i.first_number >= COALESCE((SELECT s.first_number FROM fanout.stream s WHERE s.stream_id = i.stream_id), 1)
   AND EXISTS (SELECT 1 FROM fanout.job j WHERE j.id = i.stream_id)
