-- A worker process comes up: $1 boot id, $2 name, $3 host, $4 pid, $5 version, $6 kinds, $7 concurrency, $8 lease.
INSERT INTO fanout.worker (id, name, host, pid, version, kinds, concurrency, lease)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
ON CONFLICT (id) DO UPDATE SET last_beat_at = clock_timestamp(), kinds = excluded.kinds
