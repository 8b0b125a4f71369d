-- $1 name.   No row: there is none.
DELETE FROM fanout.cron WHERE name = $1 RETURNING declared_by
