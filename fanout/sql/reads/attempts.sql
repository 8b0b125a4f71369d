-- The runs of a job, the first one first. $1 id.
SELECT attempt, started_at, ended_at, worker_id, outcome, error_type, error
  FROM fanout.attempts WHERE job_id = $1 ORDER BY attempt
