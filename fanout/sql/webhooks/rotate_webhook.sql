-- A new secret; the one before signs as well for a while. $1 name, $2 secret, $3 how long.   No row: there is none.
UPDATE fanout.webhook
   SET secret = $2,
       old_secret = CASE WHEN $3::interval > interval '0' THEN secret END,
       old_secret_until = CASE WHEN $3::interval > interval '0' THEN clock_timestamp() + $3::interval END
 WHERE name = $1
RETURNING name
