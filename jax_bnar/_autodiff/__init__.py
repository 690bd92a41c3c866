"""Derivatives of the operators, forward and reverse, and rematerialisation."""
