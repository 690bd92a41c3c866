"""The pictures of README and docs, drawn from committed results by `make figures`."""
