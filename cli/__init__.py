"""The command line, installed as merging_cli."""
