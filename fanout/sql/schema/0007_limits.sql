-- Limits, global over all pods: what may run at once, and how often; and who uses or waits for a slot of a named one.
-- A running job of a kind IS the slot it uses of its kind's limit, so that nothing can leak: a rescue gives it back.

-- LIMIT is a reserved word, so this table has a plural name. `kind:papers_extract` is the limit of a kind, any other
-- name a resource that handlers ask for: `job.limit("parser")`. What an operator says wins over what the code says,
-- field by field, until `fanout limit reset`.
CREATE TABLE fanout.limits (
    name                text PRIMARY KEY CHECK (name ~ '^(kind:)?[A-Za-z][A-Za-z0-9_]{0,62}$' OR name = ':partitions'),
    code                jsonb,
    operator            jsonb,
    requests_at         timestamptz, -- when the requests granted so far were due, had they come at the steady rate
    weight_at           timestamptz, -- the same of their weights
    updated_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    kind                text GENERATED ALWAYS AS (CASE WHEN starts_with(name, 'kind:') THEN substr(name, 6) END) STORED,
    concurrency         integer GENERATED ALWAYS AS
                        (((COALESCE(code, '{}') || COALESCE(operator, '{}')) ->> 'concurrency')::integer) STORED,
    per_partition       integer GENERATED ALWAYS AS
                        (((COALESCE(code, '{}') || COALESCE(operator, '{}')) ->> 'per_partition')::integer) STORED,
    requests_per_minute double precision GENERATED ALWAYS AS
                        (((COALESCE(code, '{}') || COALESCE(operator, '{}')) ->> 'requests_per_minute')::double precision) STORED,
    weight_per_minute   double precision GENERATED ALWAYS AS
                        (((COALESCE(code, '{}') || COALESCE(operator, '{}')) ->> 'weight_per_minute')::double precision) STORED,
    burst               double precision GENERATED ALWAYS AS -- seconds of an unused rate that may be used at once
                        (((COALESCE(code, '{}') || COALESCE(operator, '{}')) ->> 'burst')::double precision) STORED,
    CONSTRAINT limits_counts CHECK (concurrency >= 0 AND per_partition >= 0),
    CONSTRAINT limits_rates CHECK (requests_per_minute > 0 AND weight_per_minute > 0 AND burst >= 0),
    CONSTRAINT limits_of_kinds CHECK (kind IS NULL OR (requests_per_minute IS NULL AND weight_per_minute IS NULL))
) WITH (fillfactor = 50);

CREATE UNIQUE INDEX limits_kind ON fanout.limits (kind)
    WHERE kind IS NOT NULL AND (concurrency IS NOT NULL OR per_partition IS NOT NULL);

-- Claims of jobs that have a partition take turns at this row: a batch's children may be of several kinds.
INSERT INTO fanout.limits (name) VALUES (':partitions');

-- One row per handler that is, or waits to be, within `async with job.limit(…)`. It lives as long as the claim of its
-- job: one whose job is no longer processing with this attempt and token is dead, and removed by the next who asks.
CREATE TABLE fanout.slot (
    limit_name  text NOT NULL,
    job_id      bigint NOT NULL,
    attempt     integer NOT NULL,
    number      integer NOT NULL,            -- a job may use several of one limit
    claim_token uuid NOT NULL,
    partition   text NOT NULL DEFAULT '',    -- whose share it uses
    lane        text NOT NULL DEFAULT '',    -- whose turn it is: the partition, or else the batch
    weight      double precision NOT NULL CHECK (weight >= 0),
    asked_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    granted_at  timestamptz,                 -- NULL: it waits
    PRIMARY KEY (limit_name, job_id, attempt, number)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
CREATE INDEX slot_job ON fanout.slot (job_id);
