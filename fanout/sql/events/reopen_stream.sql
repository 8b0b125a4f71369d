-- A root job was opened again, so its stream goes on after its end. $1 stream id.
UPDATE fanout.stream s SET closed = false, updated_at = clock_timestamp()
 WHERE s.stream_id = $1 AND s.closed AND EXISTS (SELECT 1 FROM fanout.job j WHERE j.id = $1 AND j.finished_at IS NULL)
