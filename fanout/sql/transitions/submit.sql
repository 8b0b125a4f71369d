-- nothing -> pending, many in one round trip. $1 kinds, $2 payloads, $3 keys, $4 priorities, $5 run_at, $6 delays in seconds,
-- $7 max retries, $8 on_closed, $9 tenants, $10 options;
-- keys ascending, so that two callers with the same keys do not deadlock.
SELECT s.id, s.created, s.same
  FROM unnest($1::text[], $2::text[], $3::text[], $4::int[], $5::timestamptz[], $6::float8[], $7::int[], $8::text[], $9::text[], $10::text[])
       WITH ORDINALITY AS u (kind, payload, key, priority, run_at, delay, max_retries, on_closed, tenant, options, n)
 CROSS JOIN LATERAL fanout.submit_job(u.kind, u.payload::json, u.key, u.priority, u.run_at, u.delay, u.max_retries, u.on_closed, u.tenant,
                                         u.options::jsonb) AS s
 ORDER BY u.n
