"""What every package uses: files, caches, lazy names, provenance."""
