"""Labelled texts from registry packages, and the training that both text suites share."""
