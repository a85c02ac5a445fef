"""The imitation of the public libraries; on `sys.path` where these are absent."""
