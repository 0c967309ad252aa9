"""The command line. Importing it loads typer alone; commands import the rest when they run."""
