"""Real models, data and experts from registry packages: what the results table is measured on."""
