"""The figures of the README and docs, drawn from committed results by `make figures`."""
