"""Layers built on the operators; this level holds what the libraries of layers share."""
