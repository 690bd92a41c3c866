"""One XLA custom call each: the calls, the registered targets, what export must know."""
