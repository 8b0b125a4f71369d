       -- An open child with an excuse: somebody works on it; or it is a batch of its own; it is not long due; no live
       -- worker that serves its kind has had a free slot for that long. A mere claim is a sign of life as well.
       AND NOT EXISTS (
           SELECT 1 FROM fanout.job o
            WHERE o.parent_id = c.id AND o.status = 'processing'
              AND (o.lease_expires_at > statement_timestamp() OR o.claimed_at > statement_timestamp() - $2::interval))
       AND NOT EXISTS (
           SELECT 1 FROM fanout.job o
            WHERE o.parent_id = c.id AND o.status IN ('pending', 'waiting')
              AND (o.status = 'waiting'
                   OR o.claimed_at > statement_timestamp() - $2::interval
                   OR o.run_at > statement_timestamp() - $2::interval
                   OR NOT EXISTS (
                      SELECT 1 FROM fanout.worker w
                       WHERE o.kind = ANY (w.kinds) AND w.last_beat_at > statement_timestamp() - w.lease
                         AND w.free_since < statement_timestamp() - $2::interval)))
