-- What the doctor asks of the server.
SELECT current_setting('server_version') AS server_version, current_setting('server_version_num')::int AS server_version_num,
       current_setting('fsync') AS fsync, current_setting('synchronous_commit') AS synchronous_commit,
       current_setting('full_page_writes') AS full_page_writes,
       current_setting('max_connections')::int AS max_connections, current_setting('default_transaction_isolation') AS isolation,
       pg_is_in_recovery() AS in_recovery, pg_notification_queue_usage()::float8 AS notification_queue_usage,
       extract(epoch FROM clock_timestamp())::float8 AS server_epoch,
       -- Of all databases: max_connections is the server's.
       (SELECT count(*)::int FROM pg_stat_activity WHERE datname IS NOT NULL) AS connections,
       (SELECT extract(epoch FROM max(clock_timestamp() - xact_start))::float8 FROM pg_stat_activity
         WHERE datname = current_database() AND pid <> pg_backend_pid()) AS oldest_transaction_seconds
