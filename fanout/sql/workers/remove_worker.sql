-- A worker process has stopped in good order. $1 boot id.
DELETE FROM fanout.worker WHERE id = $1
