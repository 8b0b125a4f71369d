-- Submitting, for Python and for every other language, with the same guarantees.

-- One job, or the job that already holds the idempotency key. `same` is false when that one has other content.
-- ON CONFLICT waits for a rival transaction and inserts if that one rolls back, so a caller never gets the id of a
-- job that does not exist.
CREATE FUNCTION fanout.submit_job(
    new_kind text, new_payload json, new_key text, new_priority integer, new_run_at timestamptz, new_delay double precision,
    new_max_retries integer, new_on_closed text, new_tenant text DEFAULT ''
) RETURNS TABLE (id bigint, created boolean, same boolean)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
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
    LOOP
        RETURN QUERY
            INSERT INTO fanout.job AS j (tenant, kind, payload, idempotency_key, priority, run_at, max_retries, on_closed)
            SELECT new_tenant, new_kind, COALESCE(new_payload, 'null'), new_key, COALESCE(new_priority, 5),
                   COALESCE(new_run_at, clock_timestamp() + make_interval(secs => COALESCE(new_delay, 0))),
                   COALESCE(new_max_retries, k.max_retries, 3),
                   COALESCE(new_on_closed, k.on_closed)
              FROM (VALUES (1)) AS one (row) LEFT JOIN fanout.kind k ON k.name = new_kind
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
    tenant text DEFAULT ''
) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    submitted record;
BEGIN
    SELECT * INTO STRICT submitted
      FROM fanout.submit_job(submit.kind, submit.payload::text::json, submit.key, submit.priority, submit.run_at,
                             extract(epoch FROM submit.delay)::double precision, submit.max_retries, submit.on_closed, submit.tenant);
    IF NOT submitted.same THEN
        RAISE SQLSTATE 'FO409' USING
            MESSAGE = format('idempotency key %L belongs to job %s, which has other content', submit.key, submitted.id),
            HINT = 'Use a new key for a new request, or submit exactly what was submitted with this one.';
    END IF;
    RETURN submitted.id;
END $$;

REVOKE ALL ON FUNCTION fanout.submit_job(text, json, text, integer, timestamptz, double precision, integer, text, text) FROM PUBLIC;
REVOKE ALL ON FUNCTION fanout.submit(text, jsonb, text, integer, timestamptz, interval, integer, text, text) FROM PUBLIC;
