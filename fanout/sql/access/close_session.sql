-- End a session. $1 SHA-256.
DELETE FROM fanout.api_session WHERE sha256 = $1
