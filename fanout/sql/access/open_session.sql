-- A session for the holder of a key; some that ran out go at the same time. $1 the key's SHA-256, $2 the session's SHA-256,
-- $3 how long.   No row: nobody's key, or it is revoked.
WITH old AS (
    SELECT sha256 FROM fanout.api_session WHERE expires_at < statement_timestamp() LIMIT 100 FOR UPDATE SKIP LOCKED),
gone AS (DELETE FROM fanout.api_session s USING old WHERE s.sha256 = old.sha256),
k AS (SELECT id FROM fanout.api_key WHERE sha256 = $1 AND revoked_at IS NULL)
INSERT INTO fanout.api_session (sha256, key_id, expires_at)
SELECT $2, k.id, statement_timestamp() + $3::interval FROM k RETURNING key_id
