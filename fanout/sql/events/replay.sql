-- Batches of a stream from a number on, in order. $1 stream id, $2 first number wanted, $3 last number wanted, $4 most bytes.
-- The batch that holds $2 may begin before it. At least one batch, at most 500.
SELECT b.first_number, b.count, b.late, b.body, b.mark
  FROM (SELECT l.*, sum(octet_length(l.body)) OVER (ORDER BY l.first_number) - octet_length(l.body) AS bytes_before
          FROM (SELECT b.first_number, b.count, b.late, b.body, b.mark
                  FROM fanout.event_batch b
                 WHERE b.stream_id = $1 AND b.first_number <= $3
                   AND b.first_number >= COALESCE(
                       (SELECT max(x.first_number) FROM fanout.event_batch x
                         WHERE x.stream_id = $1 AND x.first_number <= $2), $2)
                 ORDER BY b.first_number LIMIT 500) l) b
 WHERE b.bytes_before < $4 ORDER BY b.first_number
