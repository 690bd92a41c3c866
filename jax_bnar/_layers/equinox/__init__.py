"""The Equinox layer; import it from `jax_bnar.equinox_layers`."""
