"""Configurations, the traced module, the application around it."""
