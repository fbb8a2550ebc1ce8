"""Run by a peer's own Python. They lie apart, so that no module of ours hides a peer of its name."""
