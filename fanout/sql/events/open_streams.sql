-- Heads for streams that have none yet. $1 stream ids, ascending.
INSERT INTO fanout.stream (stream_id) SELECT DISTINCT s FROM unnest($1::bigint[]) AS s ORDER BY s ON CONFLICT DO NOTHING
