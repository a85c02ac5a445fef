"""The imitation of the public libraries. It is on `sys.path` where these are absent."""
