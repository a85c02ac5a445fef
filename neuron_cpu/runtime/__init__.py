"""What the SDK runs beneath its public libraries: graphs, and the ranks that run them."""
