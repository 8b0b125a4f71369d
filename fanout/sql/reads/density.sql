-- Children in the order of keys, so many a bucket, counted by state. $1 parent, $2 children a bucket.
SELECT min(c.document_key) AS first_key,
       (count(*) FILTER (WHERE c.status = 'pending'))::int AS p, (count(*) FILTER (WHERE c.status = 'processing'))::int AS r,
       (count(*) FILTER (WHERE c.status = 'waiting'))::int AS w, (count(*) FILTER (WHERE c.status = 'completed'))::int AS c,
       (count(*) FILTER (WHERE c.status = 'failed'))::int AS f, (count(*) FILTER (WHERE c.status = 'cancelled'))::int AS x
  FROM (SELECT document_key, status, (row_number() OVER (ORDER BY document_key) - 1) / $2 AS bucket
          FROM fanout.job WHERE parent_id = $1) c
 GROUP BY c.bucket ORDER BY c.bucket
