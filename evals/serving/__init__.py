"""Two real servers, stock and candidate, behind OpenAI-compatible routes: the `serving` profile."""
