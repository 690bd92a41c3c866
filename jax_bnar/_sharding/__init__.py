"""Several devices: how arrays lie on them, and what crosses between them."""
