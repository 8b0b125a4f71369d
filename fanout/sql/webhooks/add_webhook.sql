-- A new endpoint. $1 name, $2 url, $3 events, $4 tenant (NULL: all), $5 secret.   No row: there is one of this name.
INSERT INTO fanout.webhook (name, url, events, tenant, secret) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (name) DO NOTHING
RETURNING name
