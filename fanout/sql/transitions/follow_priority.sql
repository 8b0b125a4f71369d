-- Any open state stays what it is: ONE batch within a batch takes its root's priority. Its row is where its children are
-- counted, so it is locked most of the time, and set_priority_chunk passes it over; this one waits.
-- $1 id.   MUST be the second statement of the transaction that took lock_job on it.
UPDATE fanout.job c SET priority = r.priority
  FROM fanout.job r
 WHERE c.id = $1 AND c.finished_at IS NULL AND r.id = c.root_id AND c.priority <> r.priority
RETURNING c.id
