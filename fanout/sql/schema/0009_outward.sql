-- What goes out: where webhooks are sent, and incidents, each of which is told of once.

-- The secrets themselves: what signs cannot be a hash. Only roles that send need to read this table.
CREATE TABLE fanout.webhook (
    name             text PRIMARY KEY CHECK (octet_length(name) BETWEEN 1 AND 128),
    url              text NOT NULL CHECK (octet_length(url) BETWEEN 1 AND 2048),
    events           text[] NOT NULL CHECK (cardinality(events) > 0
                                            AND events <@ ARRAY['batch.closed', 'alert.opened', 'alert.closed']),
    tenant           text CHECK (octet_length(tenant) BETWEEN 1 AND 128), -- whose batches it is told of; NULL: everybody's
    secret           bytea NOT NULL CHECK (octet_length(secret) BETWEEN 24 AND 64),
    old_secret       bytea CHECK (octet_length(old_secret) BETWEEN 24 AND 64), -- signs beside the new one for a while
    old_secret_until timestamptz,
    enabled          boolean NOT NULL DEFAULT true,
    disabled_reason  text,
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT webhook_old_secret CHECK ((old_secret IS NULL) = (old_secret_until IS NULL))
);

CREATE TABLE fanout.incident (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind      text NOT NULL CHECK (kind IN ('batch_stuck', 'failure_rate', 'no_worker', 'engine_error', 'notification_queue')),
    subject   text NOT NULL,             -- a job's id, a kind of job, a loop of a worker; empty where there is but one
    job_id    bigint,
    worker_id uuid,                      -- of an engine error: whose it is
    message   text NOT NULL,
    opened_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    closed_at timestamptz,
    told      smallint NOT NULL DEFAULT 0 CHECK (told BETWEEN 0 AND 2) -- hooks were told of its opening: 1, and of its end: 2
);
-- What makes it once over all pods: one is open at most of each kind and subject.
CREATE UNIQUE INDEX incident_open ON fanout.incident (kind, subject) WHERE closed_at IS NULL;
CREATE INDEX incident_untold ON fanout.incident (id) WHERE told < 2;
CREATE INDEX incident_closed ON fanout.incident (closed_at) WHERE closed_at IS NOT NULL;

-- Batches inside a batch, among a million leaves; and batches by the time of their close.
CREATE INDEX job_nested ON fanout.job (parent_id, id) WHERE parent_id IS NOT NULL AND (total > 0 OR on_closed IS NOT NULL);
CREATE INDEX job_batch_finished ON fanout.job (finished_at) WHERE total > 0 AND finished_at IS NOT NULL;
