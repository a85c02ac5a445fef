"""The first hour on a device: what is measured, how, and what becomes of it."""
