-- Workers that were lost more than a day ago.
DELETE FROM fanout.worker WHERE last_beat_at < clock_timestamp() - interval '1 day'
