-- After an unknown outcome: which of these claims did this worker's own finish end? $1 ids, $2 attempts, $3 the worker's token.
SELECT j.id FROM unnest($1::bigint[], $2::int[]) AS i (id, attempt)
  JOIN fanout.job j ON j.id = i.id AND j.attempt = i.attempt AND j.ended_by = $3
