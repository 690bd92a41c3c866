"""The Linen layers."""
