"""Examples: where they come from, how they are drawn, and which head reads a task's features."""
