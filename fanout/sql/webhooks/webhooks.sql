-- All endpoints, without their secrets.
SELECT name, url, events, tenant, enabled, disabled_reason, created_at,
       CASE WHEN old_secret_until > statement_timestamp() THEN old_secret_until END AS old_secret_until
  FROM fanout.webhook ORDER BY name
