"""Communication between devices, as counted in compiled HLO."""
