-- Numbers of this stream were given out twice: a fail-over lost some that watchers have seen. $1 stream id, $2 the generation
-- that they saw.   No row: somebody has said so already.
UPDATE fanout.stream SET generation = $2 + 1, updated_at = clock_timestamp()
 WHERE stream_id = $1 AND generation <= $2 RETURNING generation
