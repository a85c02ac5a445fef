"""Protobuf classes for the format of the compiler's graphs."""
