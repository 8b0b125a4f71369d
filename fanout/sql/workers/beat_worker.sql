-- A worker lives: $1 boot id, $2 running, $3 has it a free slot?, $4 state.   No row: it was pruned, register again.
UPDATE fanout.worker
   SET last_beat_at = clock_timestamp(), running = $2, state = $4,
       free_since = CASE WHEN NOT $3 THEN NULL ELSE COALESCE(free_since, clock_timestamp()) END
 WHERE id = $1
RETURNING id
