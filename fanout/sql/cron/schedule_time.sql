-- The database's time: no schedule begins by a pod's clock.
SELECT statement_timestamp() AS now
