"""Named tensors on disk and in memory: read when asked for, written as they come."""
