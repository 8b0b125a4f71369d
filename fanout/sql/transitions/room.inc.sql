                      -- There is room under the limits of its kind, its partition and its batch. For single jobs only:
                      -- it counts anew for each.
                      AND NOT EXISTS (
                          SELECT 1 FROM fanout.limits l
                           WHERE l.kind = j.kind AND (l.concurrency IS NOT NULL OR l.per_partition IS NOT NULL)
                             AND (l.concurrency <= (SELECT count(*) FROM fanout.job r
                                                     WHERE r.status = 'processing' AND r.kind = j.kind)
                                  OR l.per_partition <= (SELECT count(*) FROM fanout.job r
                                                          WHERE r.status = 'processing' AND r.kind = j.kind
                                                            AND r.partition IS NOT DISTINCT FROM j.partition)))
                      AND NOT EXISTS (
                          SELECT 1 FROM fanout.job p
                           WHERE p.id = j.parent_id
                             AND p.concurrency <= (SELECT count(*) FROM fanout.job r
                                                    WHERE r.status = 'processing' AND r.parent_id = p.id))
