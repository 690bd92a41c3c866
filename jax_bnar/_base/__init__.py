"""The lowest layer: every other part of the package may import it, and it imports none of them."""
