"""Shared by all packages: files, caches, lazy names, provenance."""
