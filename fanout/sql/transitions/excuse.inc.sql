       -- An open child with an excuse: it is a batch of its own; somebody works on it; it is not long due; or no live
       -- worker that serves its kind has had a free slot for that long.
       AND NOT EXISTS (
           SELECT 1 FROM fanout.job o
            WHERE o.parent_id = c.id AND o.status IN ('pending', 'processing', 'waiting')
              AND (o.status = 'waiting'
                   OR o.status = 'processing' AND o.lease_expires_at > statement_timestamp()
                   OR o.claimed_at > statement_timestamp() - $2::interval
                   OR o.status = 'pending' AND o.run_at > statement_timestamp() - $2::interval
                   OR o.status = 'pending' AND NOT EXISTS (
                      SELECT 1 FROM fanout.worker w
                       WHERE o.kind = ANY (w.kinds) AND w.last_beat_at > statement_timestamp() - w.lease
                         AND w.free_since < statement_timestamp() - $2::interval)))
