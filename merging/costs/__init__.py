"""What a run needs and takes, said beforehand: sizes, the laws of the methods, the machine's rates, the budget."""
