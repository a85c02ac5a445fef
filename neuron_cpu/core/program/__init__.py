"""What a traced kernel is: storages, views of them, instructions, and their recorder."""
