-- Slots left, slots asked for, weights corrected, in a transaction that holds the locks of `lock_slots`.
-- $1 claim token, $2 all names; asked for: $3 names, $4 jobs, $5 attempts, $6 numbers, $7 weights, the oldest first;
-- left: $8 names, $9 jobs, $10 attempts, $11 numbers; corrected: $12 names, $13 weights to add.
-- Asking again changes nothing. Who asks without holding the claim gets no row. A slot whose claim is gone is removed.
WITH gone AS (
    DELETE FROM fanout.slot s
     USING unnest($8::text[], $9::bigint[], $10::int[], $11::int[]) AS i (limit_name, job_id, attempt, number)
     WHERE s.limit_name = i.limit_name AND s.job_id = i.job_id AND s.attempt = i.attempt AND s.number = i.number
       AND s.claim_token = $1),
dead AS (
    DELETE FROM fanout.slot s
     WHERE s.limit_name = ANY ($2::text[])
       AND NOT EXISTS (SELECT 1 FROM fanout.job j
                        WHERE j.id = s.job_id AND j.attempt = s.attempt AND j.claim_token = s.claim_token)),
corrected AS (
    UPDATE fanout.limits l
       SET weight_at = greatest(l.weight_at, statement_timestamp()) + make_interval(secs => i.weight * 60 / l.weight_per_minute)
      FROM unnest($12::text[], $13::float8[]) AS i (name, weight)
     WHERE l.name = i.name AND l.weight_per_minute IS NOT NULL)
INSERT INTO fanout.slot (limit_name, job_id, attempt, number, claim_token, partition, lane, weight)
SELECT i.limit_name, i.job_id, i.attempt, i.number, $1, COALESCE(j.partition, ''),
       COALESCE(j.partition, 'batch:' || j.parent_id, ''), i.weight
  FROM unnest($3::text[], $4::bigint[], $5::int[], $6::int[], $7::float8[]) WITH ORDINALITY
       AS i (limit_name, job_id, attempt, number, weight, place)
  JOIN fanout.job j ON j.id = i.job_id AND j.attempt = i.attempt AND j.claim_token = $1
 ORDER BY i.place
    ON CONFLICT DO NOTHING
