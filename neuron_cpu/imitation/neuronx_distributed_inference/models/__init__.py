"""Configurations, the traced module, and the application around it."""
