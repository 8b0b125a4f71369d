"""fanout: a fan-out engine on PostgreSQL alone."""
