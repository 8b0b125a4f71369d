-- Hints that carry the data, after the commit that stored it; a statement of its own. $1 channel, $2 payloads.
SELECT set_config('lock_timeout', '250ms', true), pg_notify($1, p) FROM unnest($2::text[]) AS p
