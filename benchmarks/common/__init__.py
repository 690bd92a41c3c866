"""What every benchmark needs: the list of sites, timing, the machine, JSON."""
