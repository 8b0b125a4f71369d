-- Whose key is it? $1 SHA-256.   No row: nobody's, or it is revoked.
-- The time of use is kept to the minute, so that a busy key is not written for every request.
WITH used AS (
    UPDATE fanout.api_key SET last_used_at = statement_timestamp()
     WHERE sha256 = $1 AND revoked_at IS NULL
       AND (last_used_at IS NULL OR last_used_at < statement_timestamp() - interval '1 minute'))
SELECT id, name, scopes, tenant, created_at, last_used_at, revoked_at
  FROM fanout.api_key WHERE sha256 = $1 AND revoked_at IS NULL
