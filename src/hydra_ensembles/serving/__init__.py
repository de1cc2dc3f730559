"""Ship an ensemble: the service that answers over HTTP, and what it needs."""
