-- A new key. $1 name, $2 SHA-256, $3 scopes, $4 tenant (NULL: all).   No row: a live key has this name.
INSERT INTO fanout.api_key (name, sha256, scopes, tenant) VALUES ($1, $2, $3, $4)
ON CONFLICT (name) WHERE revoked_at IS NULL DO NOTHING
RETURNING id, name, scopes, tenant, created_at, last_used_at, revoked_at
