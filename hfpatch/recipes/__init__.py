"""Recipes: their schema and their strict reading; nothing here imports torch."""
