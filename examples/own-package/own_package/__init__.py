"""A method and an architecture for hfpatch; its entry points name them."""
