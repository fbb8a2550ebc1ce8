"""What a run needs and takes, said beforehand: sizes, laws of methods, the machine's rates, the budget."""
