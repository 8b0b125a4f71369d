-- How long the oldest due job that must run alone has been waiting, in seconds. $1 kinds.   NULL: there is none.
SELECT extract(epoch FROM statement_timestamp() - min(run_at))::float8
  FROM fanout.job WHERE status = 'pending' AND deaths > 0 AND kind = ANY ($1::text[]) AND run_at <= statement_timestamp()
