-- What an operator says of a limit. $1 name, $2 JSON object: null in a field is no such limit; what is not named stays
-- as it was. Holds for every claim and every grant that begins after its commit; takes no slot away.
INSERT INTO fanout.limits AS l (name, operator) VALUES ($1, $2::jsonb)
ON CONFLICT (name) DO UPDATE
   SET operator = COALESCE(l.operator, '{}') || excluded.operator, updated_at = clock_timestamp()
RETURNING name
