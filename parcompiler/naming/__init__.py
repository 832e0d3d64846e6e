"""Names of the values of a forward in emitted code, and how long they are in use."""
