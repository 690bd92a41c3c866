"""The XLA custom calls, the registration of their targets, and their export checks."""
