"""What the values of a forward are called: the names that emitted code assigns, and until when."""
