-- What a batch can be told beyond its kind and payload, and what is kept of attempts that ended otherwise than well.
-- All of it is NULL on a job that was told nothing, and then costs one bit each.

ALTER TABLE fanout.job
    ADD COLUMN paused boolean NOT NULL DEFAULT false, -- pending: not to be claimed; manager: nor are its children
    ADD COLUMN partition text,                        -- whose share of a limit it uses; NULL: nobody's in particular
    ADD COLUMN closing text,                          -- 'aggregate': children leave this row alone, the sweeper counts them
    ADD COLUMN concurrency integer,                   -- children of this batch that may run at once
    ADD COLUMN fail_after integer,                    -- so many failed children end it as failed
    ADD COLUMN fail_after_percent real,               -- such a share of `total`, judged once it is sealed
    ADD COLUMN deadline timestamptz,                  -- still open then: ended as failed
    ADD COLUMN sums jsonb,                            -- what handlers added up: {"tokens": 1200}
    ADD COLUMN budget jsonb,                          -- the sums that end it as failed when they are reached
    ADD COLUMN webhook text,                          -- the endpoint that is told of its close
    ADD COLUMN pruned_at timestamptz,                 -- its children are being deleted: it cannot be opened again
    ADD CONSTRAINT job_partition CHECK (partition <> '' AND octet_length(partition) <= 128),
    ADD CONSTRAINT job_closing CHECK (closing = 'aggregate'),
    ADD CONSTRAINT job_concurrency CHECK (concurrency > 0),
    ADD CONSTRAINT job_fail_after CHECK (fail_after > 0 AND fail_after_percent > 0 AND fail_after_percent <= 100),
    ADD CONSTRAINT job_sums CHECK (octet_length(sums::text) <= 4096 AND octet_length(budget::text) <= 1024),
    ADD CONSTRAINT job_webhook CHECK (octet_length(webhook) <= 128);

-- A job that is paused stands in neither index of claims; one of a partition in an index that knows whose turn it is.
DROP INDEX fanout.job_pending;
CREATE INDEX job_pending ON fanout.job (kind, priority, run_at, id)
    WHERE status = 'pending' AND deaths = 0 AND NOT paused AND partition IS NULL;
CREATE INDEX job_pending_partition ON fanout.job (kind, partition, priority, run_at, id)
    WHERE status = 'pending' AND deaths = 0 AND NOT paused AND partition IS NOT NULL;
DROP INDEX fanout.job_suspect;
CREATE INDEX job_suspect ON fanout.job (kind, run_at, id) WHERE status = 'pending' AND deaths > 0 AND NOT paused;
CREATE INDEX job_paused ON fanout.job (parent_id, id) WHERE status = 'pending' AND paused;
CREATE INDEX job_paused_batch ON fanout.job (id) WHERE paused AND status IN ('processing', 'waiting');
CREATE INDEX job_deadline ON fanout.job (deadline) WHERE deadline IS NOT NULL AND finished_at IS NULL;

-- A close may be followed by a job and told to a webhook: once each.
DROP INDEX fanout.job_follow_up;
CREATE UNIQUE INDEX job_follow_up ON fanout.job (follows_id, follows_generation, kind) WHERE follows_id IS NOT NULL;

-- Attempts that ended otherwise than well; the last, good one is in the job's own row.
CREATE TABLE fanout.attempt (
    job_id     bigint NOT NULL,
    attempt    integer NOT NULL,
    started_at timestamptz,
    ended_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    worker_id  uuid,
    outcome    text NOT NULL CHECK (outcome IN ('retry', 'failed', 'released', 'lost', 'cancelled')),
    error_type text,
    error      text,
    PRIMARY KEY (job_id, attempt)
);

-- Defaults of a kind, as `options` of a submit: {"closing": "aggregate"}.
ALTER TABLE fanout.kind ADD COLUMN options json;

DROP FUNCTION fanout.submit(text, jsonb, text, integer, timestamptz, interval, integer, text, text);
DROP FUNCTION fanout.submit_job(text, json, text, integer, timestamptz, double precision, integer, text, text);

-- One job, or the job that already holds the idempotency key. `same` is false when that one has other content.
-- ON CONFLICT waits for a rival transaction and inserts if that one rolls back, so a caller never gets the id of a
-- job that does not exist.
CREATE FUNCTION fanout.submit_job(
    new_kind text, new_payload json, new_key text, new_priority integer, new_run_at timestamptz, new_delay double precision,
    new_max_retries integer, new_on_closed text, new_tenant text DEFAULT '', new_options jsonb DEFAULT NULL
) RETURNS TABLE (id bigint, created boolean, same boolean)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    unknown text;
BEGIN
    IF new_kind IS NULL OR new_kind !~ '^[A-Za-z][A-Za-z0-9_]{0,62}$' THEN
        RAISE invalid_parameter_value USING MESSAGE = format('kind %s is not a valid name', COALESCE(quote_literal(new_kind), 'NULL')),
            HINT = 'A kind is letters, digits and underscores, starts with a letter and has at most 63, like papers_extract.';
    END IF;
    IF new_on_closed !~ '^[A-Za-z][A-Za-z0-9_]{0,62}$' THEN
        RAISE invalid_parameter_value USING MESSAGE = format('on_closed %L is not a valid name', new_on_closed),
            HINT = 'It is the kind of the follow-up job: letters, digits and underscores, like papers_report.';
    END IF;
    IF octet_length(new_payload::text) > 1024 THEN
        RAISE invalid_parameter_value USING MESSAGE = format('payload has %s bytes, the limit is 1024', octet_length(new_payload::text)),
            HINT = 'Store the data elsewhere and submit its id.';
    END IF;
    IF new_priority NOT BETWEEN 0 AND 9 THEN
        RAISE invalid_parameter_value USING MESSAGE = format('priority %s is out of range', new_priority),
            HINT = 'A priority is 0 (first) to 9 (last); the default is 5.';
    END IF;
    IF new_max_retries < 0 THEN
        RAISE invalid_parameter_value USING MESSAGE = format('max_retries %s is not a count', new_max_retries),
            HINT = 'Give 0 or more; NULL is what the kind was registered with.';
    END IF;
    IF new_key = '' OR octet_length(new_key) > 512 THEN
        RAISE invalid_parameter_value USING MESSAGE = 'the idempotency key is empty or longer than 512 bytes',
            HINT = 'Leave it out, or use a short name for the request, like import-2026-11.';
    END IF;
    IF new_options IS NOT NULL THEN
        IF jsonb_typeof(new_options) <> 'object' THEN
            RAISE invalid_parameter_value USING MESSAGE = format('options is a JSON %s, not an object', jsonb_typeof(new_options)),
                HINT = 'Give an object, like {"fail_after": 20}, or NULL.';
        END IF;
        SELECT min(o) INTO unknown FROM jsonb_object_keys(new_options) AS o
         WHERE o NOT IN ('partition', 'closing', 'concurrency', 'fail_after', 'fail_after_percent', 'deadline', 'deadline_seconds',
                         'budget', 'webhook');
        IF unknown IS NOT NULL THEN
            RAISE invalid_parameter_value USING MESSAGE = format('options has no %L', unknown),
                HINT = 'It knows partition, closing, concurrency, fail_after, fail_after_percent, deadline, deadline_seconds, budget and webhook.';
        END IF;
    END IF;
    LOOP
        RETURN QUERY
            INSERT INTO fanout.job AS j (tenant, kind, payload, idempotency_key, priority, run_at, max_retries, on_closed,
                                         partition, closing, concurrency, fail_after, fail_after_percent, deadline, budget, webhook)
            SELECT new_tenant, new_kind, COALESCE(new_payload, 'null'), new_key, COALESCE(new_priority, 5),
                   COALESCE(new_run_at, clock_timestamp() + make_interval(secs => COALESCE(new_delay, 0))),
                   COALESCE(new_max_retries, k.max_retries, 3),
                   COALESCE(new_on_closed, k.on_closed),
                   told.o ->> 'partition', told.o ->> 'closing', (told.o ->> 'concurrency')::int, (told.o ->> 'fail_after')::int,
                   (told.o ->> 'fail_after_percent')::real,
                   COALESCE((told.o ->> 'deadline')::timestamptz,
                            clock_timestamp() + make_interval(secs => (told.o ->> 'deadline_seconds')::float8)),
                   told.o -> 'budget', told.o ->> 'webhook'
              FROM (VALUES (1)) AS one (row) LEFT JOIN fanout.kind k ON k.name = new_kind
             CROSS JOIN LATERAL (SELECT CASE WHEN k.options IS NULL THEN new_options
                                             ELSE k.options::jsonb || COALESCE(new_options, '{}') END AS o) AS told
            ON CONFLICT (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
            RETURNING j.id, true, true;
        IF FOUND THEN RETURN; END IF;
        RETURN QUERY
            SELECT j.id, false,
                   j.kind = new_kind AND j.payload::text::jsonb = COALESCE(new_payload, 'null')::text::jsonb
              FROM fanout.job j WHERE j.tenant = new_tenant AND j.idempotency_key = new_key;
        IF FOUND THEN RETURN; END IF;
        -- The holder of the key was deleted in between: try again.
    END LOOP;
END $$;

-- For callers from psql, psycopg, SQLAlchemy, Django: SELECT fanout.submit('papers_batch', '{"ids": [1, 2]}', key => 'import-1');
CREATE FUNCTION fanout.submit(
    kind text, payload jsonb DEFAULT 'null', key text DEFAULT NULL, priority integer DEFAULT NULL,
    run_at timestamptz DEFAULT NULL, delay interval DEFAULT NULL, max_retries integer DEFAULT NULL, on_closed text DEFAULT NULL,
    tenant text DEFAULT '', options jsonb DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    submitted record;
BEGIN
    SELECT * INTO STRICT submitted
      FROM fanout.submit_job(submit.kind, submit.payload::text::json, submit.key, submit.priority, submit.run_at,
                             extract(epoch FROM submit.delay)::double precision, submit.max_retries, submit.on_closed, submit.tenant,
                             submit.options);
    IF NOT submitted.same THEN
        RAISE SQLSTATE 'FO409' USING
            MESSAGE = format('idempotency key %L belongs to job %s, which has other content', submit.key, submitted.id),
            HINT = 'Use a new key for a new request, or submit exactly what was submitted with this one.';
    END IF;
    RETURN submitted.id;
END $$;

REVOKE ALL ON FUNCTION fanout.submit_job(text, json, text, integer, timestamptz, double precision, integer, text, text, jsonb) FROM PUBLIC;
REVOKE ALL ON FUNCTION fanout.submit(text, jsonb, text, integer, timestamptz, interval, integer, text, text, jsonb) FROM PUBLIC;

CREATE OR REPLACE VIEW fanout.batches AS
SELECT id, kind, idempotency_key AS key,
       CASE WHEN status = 'completed' AND failed > 0 THEN 'completed with failures' ELSE status END AS outcome,
       status, verdict, reason, total, completed, failed, cancelled, total - completed - failed - cancelled AS open,
       CASE WHEN finished_at IS NOT NULL THEN 100
            WHEN total = 0 THEN 0
            ELSE least(99, (completed + failed + cancelled)::bigint * 100 / total) END::int AS percent,
       generation, on_closed, created_at, updated_at, finished_at,
       COALESCE(finished_at, clock_timestamp()) - created_at AS elapsed,
       paused, closing, deadline, sums
  FROM fanout.job
 WHERE total > 0 OR on_closed IS NOT NULL;

-- All attempts of every job, the last one among them, as a timeline.
CREATE VIEW fanout.attempts AS
SELECT job_id, attempt, started_at, ended_at, worker_id, outcome, error_type, error FROM fanout.attempt
UNION ALL
SELECT j.id, j.attempt, j.claimed_at, j.finished_at, COALESCE(j.claim_token, j.ended_by),
       CASE WHEN j.status = 'processing' THEN 'running' ELSE 'completed' END, NULL, NULL
  FROM fanout.job j
 WHERE j.attempt > 0 AND (j.status = 'processing' OR (j.status IN ('completed', 'waiting') AND j.ended_by IS NOT NULL));
