-- Schedules: what is submitted when. A tick moves next_at and submits in one statement, so it happens once.
CREATE TABLE fanout.cron (
    name         text PRIMARY KEY,
    kind         text NOT NULL,
    payload      json NOT NULL DEFAULT 'null',
    expression   text NOT NULL,                    -- five fields, read by the workers
    timezone     text NOT NULL DEFAULT 'UTC',      -- whose wall clock they speak of, like Europe/Berlin
    missed       text NOT NULL DEFAULT 'one',      -- what becomes of times at which no worker lived
    priority     integer,
    max_retries  integer,
    tenant       text NOT NULL DEFAULT '',
    options      jsonb,                            -- of the batch, as in a submit
    declared_by  text NOT NULL,                    -- 'code' says it anew with each start; an operator's word stands
    enabled      boolean NOT NULL DEFAULT true,    -- an operator's alone: code does not touch it
    next_at      timestamptz NOT NULL,
    last_at      timestamptz,                      -- the time that its last job was for
    last_job_id  bigint,
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT cron_name CHECK (name ~ '^[A-Za-z][A-Za-z0-9_]{0,62}$'),
    CONSTRAINT cron_kind CHECK (kind ~ '^[A-Za-z][A-Za-z0-9_]{0,62}$'),
    CONSTRAINT cron_payload_is_light CHECK (octet_length(payload::text) <= 1024),
    CONSTRAINT cron_missed CHECK (missed IN ('skip', 'one', 'all')),
    CONSTRAINT cron_priority CHECK (priority BETWEEN 0 AND 9),
    CONSTRAINT cron_max_retries CHECK (max_retries >= 0),
    CONSTRAINT cron_lengths CHECK (octet_length(expression) BETWEEN 9 AND 255 AND octet_length(timezone) BETWEEN 1 AND 64
                                   AND octet_length(tenant) <= 128),
    CONSTRAINT cron_declared_by CHECK (declared_by IN ('code', 'operator'))
);
