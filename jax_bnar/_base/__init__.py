"""What every other room stands on, and what knows none of them."""
