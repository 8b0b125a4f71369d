-- End a key, and with it every session that it opened. $1 name.   No row: no live key has this name.
WITH ended AS (
    UPDATE fanout.api_key SET revoked_at = clock_timestamp() WHERE name = $1 AND revoked_at IS NULL
    RETURNING id, name, scopes, tenant, created_at, last_used_at, revoked_at),
closed AS (DELETE FROM fanout.api_session s USING ended WHERE s.key_id = ended.id)
SELECT * FROM ended
