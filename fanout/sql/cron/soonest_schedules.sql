-- The schedules whose time comes first, those that are due among them, with the database's time. $1 how many.
SELECT name, expression, timezone, missed, next_at, statement_timestamp() AS now
  FROM fanout.cron WHERE enabled ORDER BY next_at, name LIMIT $1
