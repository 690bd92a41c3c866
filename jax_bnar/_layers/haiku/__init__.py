"""The Haiku layer; import it from `jax_bnar.haiku_layers`."""
