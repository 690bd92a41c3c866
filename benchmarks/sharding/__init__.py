"""What crosses devices, as counted in compiled HLO."""
