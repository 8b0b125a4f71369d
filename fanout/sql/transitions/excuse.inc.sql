       -- It is paused. Or an open child has an excuse: somebody works on it; it is a batch of its own; it is paused; it is not long due; no live
       -- worker that serves its kind has had a free slot for that long; a limit of its kind is full. A mere claim is a sign
       -- of life as well.
       AND NOT c.paused
       AND NOT EXISTS (
           SELECT 1 FROM fanout.job o
            WHERE o.parent_id = c.id AND o.status = 'processing'
              AND (o.lease_expires_at > statement_timestamp() OR o.claimed_at > statement_timestamp() - $2::interval))
       -- Nobody writes into its row when a child ends. Not EXISTS, which is hashed here: a walk over the whole table.
       AND (c.closing IS NULL OR (
           SELECT 1 FROM fanout.job o
            WHERE o.parent_id = c.id AND o.finished_at > statement_timestamp() - $2::interval LIMIT 1) IS NULL)
       AND NOT EXISTS (
           SELECT 1 FROM fanout.job o
            WHERE o.parent_id = c.id AND o.status IN ('pending', 'waiting')
              AND (o.status = 'waiting' OR o.paused
                   OR o.claimed_at > statement_timestamp() - $2::interval
                   OR o.run_at > statement_timestamp() - $2::interval
                   OR EXISTS (
                      SELECT 1 FROM fanout.limits l
                       WHERE l.kind = o.kind AND (l.concurrency IS NOT NULL OR l.per_partition IS NOT NULL)
                         AND (l.concurrency <= (SELECT count(*) FROM fanout.job r WHERE r.status = 'processing' AND r.kind = o.kind)
                              OR l.per_partition <= (SELECT count(*) FROM fanout.job r
                                                      WHERE r.status = 'processing' AND r.kind = o.kind
                                                        AND r.partition IS NOT DISTINCT FROM o.partition)))
                   OR NOT EXISTS (
                      SELECT 1 FROM fanout.worker w
                       WHERE o.kind = ANY (w.kinds) AND w.last_beat_at > statement_timestamp() - w.lease
                         AND w.free_since < statement_timestamp() - $2::interval)))
