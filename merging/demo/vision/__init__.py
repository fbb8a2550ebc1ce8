"""Pictures: experts on digits, letters and icons."""
