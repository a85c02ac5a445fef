"""What is measured, estimated or compared; nothing here prints."""
