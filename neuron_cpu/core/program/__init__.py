"""A traced kernel: storages, views of them, instructions, and their recorder."""
