"""From a lowered program to the Python source of every rank."""
