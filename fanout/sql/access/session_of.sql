-- Whose session is it? $1 SHA-256.   No row: nobody's, it has run out, or its key is revoked.
SELECT k.id, k.name, k.scopes, k.tenant, k.created_at, k.last_used_at, k.revoked_at
  FROM fanout.api_session s JOIN fanout.api_key k ON k.id = s.key_id
 WHERE s.sha256 = $1 AND s.expires_at > statement_timestamp() AND k.revoked_at IS NULL
