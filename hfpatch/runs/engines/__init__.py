"""Engines execute the units of a plan: one after the other in this process, in several, or on a cluster through Ray."""
