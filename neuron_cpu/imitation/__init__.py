"""What is imitated of the public libraries; on `sys.path` where they are not there."""
