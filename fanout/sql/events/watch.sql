-- Says that somebody watches these streams for a while. $1 stream ids, ascending, $2 how long.
INSERT INTO fanout.stream_watch AS w (stream_id, expires_at)
SELECT s, clock_timestamp() + $2::interval FROM unnest($1::bigint[]) AS s ORDER BY s
ON CONFLICT (stream_id) DO UPDATE SET expires_at = greatest(w.expires_at, excluded.expires_at)
