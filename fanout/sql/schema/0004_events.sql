-- Events: numbered without a gap in their stream. A stream is a root job; everything below it writes to it.

-- The head is a row of its own, so that log lines never wait for counters. Its lock is held to the commit, so the order
-- of numbers is the order of commits: a reader that has seen n will never find a new event below n.
CREATE TABLE fanout.stream (
    stream_id    bigint PRIMARY KEY,                -- the root job's id
    last_number  bigint NOT NULL DEFAULT 0,
    first_number bigint NOT NULL DEFAULT 1,         -- events before it were pruned
    generation   integer NOT NULL DEFAULT 1,        -- +1 when numbers were given out twice (a fail-over lost some)
    closed       boolean NOT NULL DEFAULT false,    -- its last event is the end
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT stream_numbers CHECK (first_number BETWEEN 1 AND last_number + 1)
) WITH (fillfactor = 50);

-- Many events a row. `body`: a JSON text a line, never jsonb: lines may hold what jsonb refuses.
CREATE TABLE fanout.event_batch (
    stream_id    bigint NOT NULL,
    first_number bigint NOT NULL,
    count        integer NOT NULL CHECK (count > 0),
    at           timestamptz NOT NULL DEFAULT clock_timestamp(),
    writer       uuid NOT NULL,                     -- the process that wrote it
    batch        bigint NOT NULL,                   -- its running number there: a batch that is sent again is written once
    late         bigint[],                          -- jobs in it that had been given to another worker by then
    body         bytea NOT NULL,
    PRIMARY KEY (stream_id, first_number)
);
CREATE UNIQUE INDEX event_batch_once ON fanout.event_batch (writer, batch);
CREATE INDEX event_batch_at ON fanout.event_batch (at);

-- Who looks: a stream that nobody watches is flushed seldom, and never announced. Lost in a crash: watchers say it again.
CREATE UNLOGGED TABLE fanout.stream_watch (
    stream_id  bigint PRIMARY KEY,
    expires_at timestamptz NOT NULL
) WITH (fillfactor = 50);
