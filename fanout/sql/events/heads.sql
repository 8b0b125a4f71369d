-- How far streams are, for the sweep that heals every lost hint. $1 stream ids.
SELECT s.stream_id, s.generation, s.first_number, s.last_number, s.closed
  FROM fanout.stream s WHERE s.stream_id = ANY ($1::bigint[])
