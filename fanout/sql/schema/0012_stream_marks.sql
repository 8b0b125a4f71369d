-- A fail-over to a standby that was behind loses the newest events of a stream, and their numbers are given out again. The
-- number alone does not tell: the stream may be longer than before by the time anybody looks. The mark does: it is made of the
-- mark before it and of the batch, so it says all that came before. Whoever has read up to a number asks whether the batch
-- that holds it still has the mark it had.
ALTER TABLE fanout.stream ADD COLUMN mark bigint NOT NULL DEFAULT 0;  -- that of the last batch; 0: there is none
ALTER TABLE fanout.event_batch ADD COLUMN mark bigint;                -- NULL: written before marks were
