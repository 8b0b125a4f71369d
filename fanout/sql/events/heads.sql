-- How far streams are, for the sweep that heals every lost hint, and whether what a watcher has seen is still what stands
-- there. $1 stream ids, $2 the last number that was seen of each, $3 the mark of the batch that held it; NULL: nothing was.
-- What was pruned, or written before marks were, is taken to be the same. The mark is that of the last batch, which is what
-- the next look compares; the head's own only where that has none.
SELECT s.stream_id, s.generation, s.first_number, s.last_number, s.closed,
       COALESCE((SELECT b.mark FROM fanout.event_batch b WHERE b.stream_id = s.stream_id AND b.first_number <= s.last_number
                  ORDER BY b.first_number DESC LIMIT 1), s.mark) AS mark,
       COALESCE(i.number > s.last_number
                OR i.mark <> (SELECT CASE WHEN b.first_number + b.count > i.number THEN b.mark END FROM fanout.event_batch b
                               WHERE b.stream_id = s.stream_id AND b.first_number <= i.number
                               ORDER BY b.first_number DESC LIMIT 1), false) AS lost
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS i (stream_id, number, mark)
  JOIN fanout.stream s ON s.stream_id = i.stream_id
