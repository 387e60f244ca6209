"""The command line. Starts fast: every command imports what it needs when it runs, and nothing here reaches torch."""
