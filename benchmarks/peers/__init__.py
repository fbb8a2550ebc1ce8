"""Other tools, each run from an environment of its own: README.md tells how to make them."""
