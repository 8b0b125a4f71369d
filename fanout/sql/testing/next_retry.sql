-- In how many seconds the next child of an open batch of a kind is due, if nothing runs meanwhile. $1 the batch's kind.
-- No row: nothing is to be waited for.
SELECT extract(epoch FROM min(j.run_at) - statement_timestamp())::float8 AS seconds
  FROM fanout.job r JOIN fanout.job j ON j.root_id = r.id AND j.status = 'pending' AND j.run_at > statement_timestamp()
 WHERE r.kind = $1 AND r.finished_at IS NULL
   AND NOT EXISTS (SELECT 1 FROM fanout.job p
                    WHERE p.status = 'processing' OR (p.status = 'pending' AND p.root_id = r.id AND p.run_at <= statement_timestamp()))
HAVING min(j.run_at) IS NOT NULL
