"""Text: experts on film reviews, programming languages and natural languages."""
