"""The package that the programs next to it share; each file has one role."""
