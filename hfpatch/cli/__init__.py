"""The command line. Importing it loads typer alone; each command imports what it needs when it runs."""
