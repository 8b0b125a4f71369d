-- How many children ended when: buckets of so many seconds since the job was made. $1 parent, $2 seconds a bucket.
SELECT floor(extract(epoch FROM c.finished_at - j.created_at) / $2::float8)::int AS bucket,
       (count(*) FILTER (WHERE c.status = 'completed'))::int AS completed,
       (count(*) FILTER (WHERE c.status = 'failed'))::int AS failed,
       (count(*) FILTER (WHERE c.status = 'cancelled'))::int AS cancelled
  FROM fanout.job j JOIN fanout.job c ON c.parent_id = j.id
 WHERE j.id = $1 AND c.finished_at IS NOT NULL
 GROUP BY 1 ORDER BY 1
