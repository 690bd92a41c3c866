"""The public operators on arrays, and the validation of their arguments."""
