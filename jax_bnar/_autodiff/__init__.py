"""Derivatives of the operators, in forward and reverse mode, and rematerialisation."""
