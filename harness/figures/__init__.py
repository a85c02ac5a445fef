"""Measured, estimated and compared figures; nothing here prints."""
