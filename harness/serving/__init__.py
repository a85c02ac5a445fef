"""The HTTP server: a scheduler over the cache lines of one model, and OpenAI's interface to it."""
