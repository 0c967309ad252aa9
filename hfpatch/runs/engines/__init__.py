"""Engines complete the units of a plan: one after the other in this process, in several, or on a cluster with Ray."""
