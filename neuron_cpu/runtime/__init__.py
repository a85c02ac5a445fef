"""The layer beneath the SDK's public libraries: graphs, and the ranks that run them."""
