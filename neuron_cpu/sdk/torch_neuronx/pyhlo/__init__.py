"""Protobuf classes of the compiler graph format."""
