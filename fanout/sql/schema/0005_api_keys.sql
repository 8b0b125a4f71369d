-- Who may use the HTTP API. Only hashes are kept: a key is 256 random bits, so one round of SHA-256 is enough.

CREATE TABLE fanout.api_key (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name         text NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 128),
    sha256       bytea NOT NULL UNIQUE CHECK (octet_length(sha256) = 32),
    scopes       text[] NOT NULL CHECK (scopes <@ ARRAY['read', 'submit', 'operate'] AND cardinality(scopes) > 0),
    tenant       text CHECK (octet_length(tenant) BETWEEN 1 AND 128), -- NULL: sees every tenant
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_used_at timestamptz,                       -- to the minute
    revoked_at   timestamptz
);
-- A name is free again once its key is revoked.
CREATE UNIQUE INDEX api_key_name ON fanout.api_key (name) WHERE revoked_at IS NULL;

-- What a browser holds instead of a key: a random cookie, good for hours, gone with its key.
CREATE TABLE fanout.api_session (
    sha256     bytea PRIMARY KEY CHECK (octet_length(sha256) = 32),
    key_id     bigint NOT NULL REFERENCES fanout.api_key ON DELETE CASCADE,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz NOT NULL
);
CREATE INDEX api_session_expiry ON fanout.api_session (expires_at);
CREATE INDEX api_session_key ON fanout.api_session (key_id);
