-- Forget an endpoint and its secrets. $1 name.   No row: there is none.
DELETE FROM fanout.webhook WHERE name = $1 RETURNING name
