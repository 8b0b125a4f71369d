-- Nobody claims, or ends, a job until this transaction is over.
LOCK TABLE fanout.job IN EXCLUSIVE MODE
