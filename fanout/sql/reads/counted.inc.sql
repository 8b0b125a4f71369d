-- Spliced in after FROM … j: what of its children has ended, from its row, or, where children leave that alone while it is
-- open (closing = 'aggregate'), from them.
 CROSS JOIN LATERAL (
       SELECT j.completed, j.failed, j.cancelled, j.sums, j.mark_at, j.mark_ended, j.last_mark_at, j.last_mark_ended
        WHERE j.closing IS NULL OR j.finished_at IS NOT NULL
        UNION ALL
       SELECT a.completed, a.failed, a.cancelled,
              CASE WHEN j.total = 0 THEN j.sums WHEN a.told IS NULL THEN j.own_sums ELSE fanout.add_sums(j.own_sums, a.told) END,
              greatest(j.created_at, statement_timestamp() - interval '30 s'), a.earlier, NULL, NULL
         FROM (SELECT count(*) FILTER (WHERE c.status = 'completed')::int AS completed,
                      count(*) FILTER (WHERE c.status = 'failed')::int AS failed,
                      count(*) FILTER (WHERE c.status = 'cancelled')::int AS cancelled,
                      count(*) FILTER (WHERE c.finished_at < statement_timestamp() - interval '30 s')::int AS earlier,
                      (SELECT jsonb_object_agg(e.name, e.amount)
                         FROM (SELECT e.key AS name, trim_scale(sum(e.value::numeric)) AS amount
                                 FROM fanout.job s
                                CROSS JOIN LATERAL jsonb_each_text(CASE WHEN s.finished_at IS NULL THEN s.told_sums ELSE s.sums END) AS e
                                WHERE s.parent_id = j.id AND s.sums IS NOT NULL GROUP BY e.key) e) AS told
                 FROM fanout.job c WHERE c.parent_id = j.id AND j.closing IS NOT NULL AND j.finished_at IS NULL) a
        WHERE j.closing IS NOT NULL AND j.finished_at IS NULL) t
