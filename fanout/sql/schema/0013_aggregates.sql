-- A batch that a sweep counts has not closed until the next one has been: that is not stuck.
CREATE OR REPLACE VIEW fanout.stuck AS
SELECT j.id, j.parent_id, j.kind, 'lease expired' AS why, j.lease_expires_at AS since
  FROM fanout.job j
 WHERE j.status = 'processing' AND j.lease_expires_at < clock_timestamp()
UNION ALL
SELECT min(j.id), NULL, j.kind, 'no worker serves ' || j.kind, min(j.run_at)
  FROM fanout.job j
 WHERE j.status = 'pending' AND NOT j.paused AND j.run_at <= clock_timestamp()
   AND NOT EXISTS (SELECT 1 FROM fanout.worker w
                    WHERE j.kind = ANY (w.kinds) AND w.last_beat_at >= clock_timestamp() - w.lease)
 GROUP BY j.kind
UNION ALL
SELECT j.id, j.parent_id, j.kind, 'no child is open, yet it has not closed', j.updated_at
  FROM fanout.job j
 WHERE j.status = 'waiting'
   AND NOT EXISTS (SELECT 1 FROM fanout.job c WHERE c.parent_id = j.id AND c.status = 'processing')
   AND NOT EXISTS (SELECT 1 FROM fanout.job c WHERE c.parent_id = j.id AND c.status IN ('pending', 'waiting'))
   AND NOT (j.closing IS NOT NULL
            AND EXISTS (SELECT 1 FROM fanout.job c
                         WHERE c.parent_id = j.id AND c.finished_at > clock_timestamp() - interval '1 min'));
