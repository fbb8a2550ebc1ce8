"""What a run learned, for people and for programs."""
