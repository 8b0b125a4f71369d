-- Watches that ran out.
DELETE FROM fanout.stream_watch WHERE expires_at < clock_timestamp() - interval '1 hour'
