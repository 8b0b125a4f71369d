-- All keys, those that are revoked too.
SELECT id, name, scopes, tenant, created_at, last_used_at, revoked_at FROM fanout.api_key ORDER BY id
