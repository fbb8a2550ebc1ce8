"""The suite text-t5-8: eight text tasks on a small T5."""
