-- The one table, its state machine held by CHECKs, and the indexes that claims, rescues and closes walk.
-- Written for the schema "fanout"; another name is put in when the file is loaded.

-- Columns of fixed width that are never NULL come first: rows are taken apart from the left.
CREATE TABLE fanout.job (
    id                 bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run_at             timestamptz NOT NULL DEFAULT clock_timestamp(),
    created_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at         timestamptz NOT NULL DEFAULT clock_timestamp(),  -- of a manager: its last progress
    attempt            integer NOT NULL DEFAULT 0, -- the fencing number: +1 in every claim, never reused
    failures           integer NOT NULL DEFAULT 0, -- the retry budget that was used
    deaths             integer NOT NULL DEFAULT 0, -- lost leases; written by rescue alone
    max_retries        integer NOT NULL DEFAULT 3,
    total              integer NOT NULL DEFAULT 0, -- children
    completed          integer NOT NULL DEFAULT 0,
    failed             integer NOT NULL DEFAULT 0,
    cancelled          integer NOT NULL DEFAULT 0,
    generation         integer NOT NULL DEFAULT 1, -- +1 whenever a closed job is opened again
    depth              smallint NOT NULL DEFAULT 0,
    priority           smallint NOT NULL DEFAULT 5, -- 0 is served first, 9 last
    status             text NOT NULL DEFAULT 'pending',
    kind               text NOT NULL,
    tenant             text NOT NULL DEFAULT '',   -- whose it is; children and follow-ups inherit it
    payload            json NOT NULL DEFAULT 'null',
    -- No foreign key: it would look the same parent up once per child (a third of the dispatch). Children are born in the
    -- statement that holds their parent's row (fan_out), and are only ever deleted with it.
    parent_id          bigint,
    root_id            bigint,                     -- NULL: this job is a root
    document_key       text,
    claim_token        uuid,                       -- the boot id of the worker that holds the claim
    lease_expires_at   timestamptz,                -- in NO index: a heartbeat must stay HOT
    claimed_at         timestamptz,
    finished_at        timestamptz,
    ended_by           uuid,                       -- the worker whose finish ended it; NULL: rescue, cancel, close
    result             json,
    error              text,
    error_type         text,
    verdict            text,                       -- what it will be once its open children have ended
    reason             text,
    checkpoint         json,
    idempotency_key    text,
    on_closed          text,                       -- the kind of its follow-up job
    follows_id         bigint,                     -- the job whose close enqueued this one
    follows_generation integer,
    mark_at            timestamptz,                -- two marks of "so many had ended by then": the rate over
    last_mark_at       timestamptz,                --   the last 15 to 30 s without an index on finished_at
    mark_ended         integer,
    last_mark_ended    integer,

    CONSTRAINT job_status CHECK (status IN ('pending', 'processing', 'waiting', 'completed', 'failed', 'cancelled')),
    CONSTRAINT job_verdict CHECK (verdict IN ('failed', 'cancelled')),
    CONSTRAINT job_counters CHECK (max_retries >= 0 AND total >= 0 AND completed >= 0 AND failed >= 0 AND cancelled >= 0
                                   AND completed + failed + cancelled <= total),
    CONSTRAINT job_token_iff_processing CHECK ((claim_token IS NOT NULL) = (status = 'processing')
                                               AND (lease_expires_at IS NOT NULL) = (status = 'processing')),
    CONSTRAINT job_finished_iff_terminal CHECK ((finished_at IS NOT NULL)
                                                = (status IN ('completed', 'failed', 'cancelled'))),
    CONSTRAINT job_waiting_is_incomplete CHECK (status <> 'waiting' OR completed + failed + cancelled < total),
    CONSTRAINT job_closed_is_complete CHECK (finished_at IS NULL OR completed + failed + cancelled = total),
    CONSTRAINT job_root_iff_depth_0 CHECK ((parent_id IS NULL) = (depth = 0)
                                           AND (root_id IS NULL) = (parent_id IS NULL)
                                           AND (document_key IS NULL) = (parent_id IS NULL)),
    -- The whole rule is a regular expression, which would run on every version of every row: it stands at the ways in.
    CONSTRAINT job_kind_name CHECK (kind <> '' AND strpos(kind, ':') = 0 AND strpos(kind, '.') = 0),
    CONSTRAINT job_on_closed_name CHECK (on_closed <> '' AND strpos(on_closed, ':') = 0 AND strpos(on_closed, '.') = 0),
    CONSTRAINT job_priority CHECK (priority BETWEEN 0 AND 9),
    CONSTRAINT job_payload_is_light CHECK (octet_length(payload::text) <= 1024),
    CONSTRAINT job_key_lengths CHECK (octet_length(document_key) <= 512 AND octet_length(idempotency_key) <= 512
                                      AND octet_length(tenant) <= 128)
) WITH (fillfactor = 85, autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05);

-- One child per document of a manager; also the order in which children are paged.
CREATE UNIQUE INDEX job_child ON fanout.job (parent_id, document_key) WHERE parent_id IS NOT NULL;
CREATE UNIQUE INDEX job_idempotency ON fanout.job (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE UNIQUE INDEX job_follow_up ON fanout.job (follows_id, follows_generation) WHERE follows_id IS NOT NULL;
-- Claims. A job with a death runs alone, so it stands in an index of its own.
CREATE INDEX job_pending ON fanout.job (kind, priority, run_at, id) WHERE status = 'pending' AND deaths = 0;
CREATE INDEX job_suspect ON fanout.job (kind, run_at, id) WHERE status = 'pending' AND deaths > 0;
-- The open children of a job stand in two: a claim then adds to the second one only.
CREATE INDEX job_children_idle ON fanout.job (parent_id, id)
    WHERE parent_id IS NOT NULL AND status IN ('pending', 'waiting');
CREATE INDEX job_processing ON fanout.job (parent_id, id) WHERE status = 'processing';
CREATE INDEX job_waiting ON fanout.job (id) WHERE status = 'waiting';
CREATE INDEX job_children_failed ON fanout.job (parent_id, document_key)
    WHERE parent_id IS NOT NULL AND status = 'failed';
CREATE INDEX job_root ON fanout.job (id) WHERE parent_id IS NULL;

-- What the workers that serve a kind registered for it, so that callers from SQL get the same defaults.
CREATE TABLE fanout.kind (
    name             text PRIMARY KEY CHECK (name ~ '^[A-Za-z][A-Za-z0-9_]{0,62}$'),
    max_retries      integer NOT NULL,
    timeout_seconds  double precision NOT NULL,
    on_closed        text,
    payload_schema   json,
    registered_at    timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- One row per worker process that lives or died lately. `free_since`: since when it has had a free slot without a break.
CREATE TABLE fanout.worker (
    id            uuid PRIMARY KEY,
    name          text NOT NULL,
    host          text NOT NULL,
    pid           integer NOT NULL,
    version       text NOT NULL,
    kinds         text[] NOT NULL,
    concurrency   integer NOT NULL,
    running       integer NOT NULL DEFAULT 0,
    lease         interval NOT NULL,
    started_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_beat_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    free_since    timestamptz,
    state         text NOT NULL DEFAULT 'running' CHECK (state IN ('running', 'stopping'))
) WITH (fillfactor = 50);

-- One row: what makes the keys of this installation's jobs (`job.key`) differ from every other one's.
CREATE TABLE fanout.installation (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    id       uuid NOT NULL DEFAULT gen_random_uuid()
);
INSERT INTO fanout.installation DEFAULT VALUES;
