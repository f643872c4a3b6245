"""What other projects' code calls, and what it knows of theirs. Importing this package imports nothing."""
