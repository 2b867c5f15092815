"""`fasttrack serve`: a checkpoint of ours behind OpenAI-compatible routes, decoded by the in-process engine."""
