"""Names of environment variables."""

HOST_WORLD_SIZE = "HOST_WORLD_SIZE"
