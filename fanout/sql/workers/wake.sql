-- A hint to idle workers, in an autocommit statement of its own, never beside data: NOTIFY takes a lock on the whole
-- database at commit. lock_timeout, for statement_timeout does not end that wait. $1 channel, $2 payload.
SELECT set_config('lock_timeout', '250ms', true), pg_notify($1, $2)
