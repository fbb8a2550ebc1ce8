"""Scores per task and distance to the experts."""
