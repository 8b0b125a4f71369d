-- What a person asks at 3 a.m., in SQL. No view holds a lock or writes.

CREATE VIEW fanout.batches AS
SELECT id, kind, idempotency_key AS key,
       CASE WHEN status = 'completed' AND failed > 0 THEN 'completed with failures' ELSE status END AS outcome,
       status, verdict, reason, total, completed, failed, cancelled, total - completed - failed - cancelled AS open,
       CASE WHEN finished_at IS NOT NULL THEN 100
            WHEN total = 0 THEN 0
            ELSE least(99, (completed + failed + cancelled)::bigint * 100 / total) END::int AS percent,
       generation, on_closed, created_at, updated_at, finished_at,
       COALESCE(finished_at, clock_timestamp()) - created_at AS elapsed
  FROM fanout.job
 WHERE total > 0 OR on_closed IS NOT NULL;

CREATE VIEW fanout.children AS
SELECT id, parent_id, document_key, kind, status, attempt, failures, deaths, run_at, claimed_at, finished_at,
       finished_at - claimed_at AS took, claim_token AS worker_id, lease_expires_at, error_type, error, reason,
       payload, result
  FROM fanout.job
 WHERE parent_id IS NOT NULL;

CREATE VIEW fanout.failures AS
SELECT id, parent_id, document_key, kind, failures, deaths, finished_at, error_type, error
  FROM fanout.job
 WHERE status = 'failed';

CREATE VIEW fanout.workers AS
SELECT w.id, w.name, w.host, w.pid, w.version, w.kinds, w.concurrency, w.running,
       greatest(0, w.concurrency - w.running) AS free, w.started_at, w.last_beat_at, w.free_since,
       CASE WHEN w.last_beat_at < clock_timestamp() - w.lease THEN 'lost' ELSE w.state END AS state
  FROM fanout.worker w;

-- What does not move, and why. Nothing here means: nothing is stuck.
CREATE VIEW fanout.stuck AS
SELECT j.id, j.parent_id, j.kind, 'lease expired' AS why, j.lease_expires_at AS since
  FROM fanout.job j
 WHERE j.status = 'processing' AND j.lease_expires_at < clock_timestamp()
UNION ALL
SELECT min(j.id), NULL, j.kind, 'no worker serves ' || j.kind, min(j.run_at)
  FROM fanout.job j
 WHERE j.status = 'pending' AND j.run_at <= clock_timestamp()
   AND NOT EXISTS (SELECT 1 FROM fanout.worker w
                    WHERE j.kind = ANY (w.kinds) AND w.last_beat_at >= clock_timestamp() - w.lease)
 GROUP BY j.kind
UNION ALL
SELECT j.id, j.parent_id, j.kind, 'no child is open, yet it has not closed', j.updated_at
  FROM fanout.job j
 WHERE j.status = 'waiting'
   AND NOT EXISTS (SELECT 1 FROM fanout.job c WHERE c.parent_id = j.id AND c.status = 'processing')
   AND NOT EXISTS (SELECT 1 FROM fanout.job c WHERE c.parent_id = j.id AND c.status IN ('pending', 'waiting'));
