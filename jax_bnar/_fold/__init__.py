"""Folds the BatchNorms of any network in evaluation into its convolutions and matrix products."""

from jax_bnar._fold.api import FoldedNetwork, fold_batch_norms
from jax_bnar._fold.report import FoldedLayer, FoldingReport

__all__ = ["FoldedLayer", "FoldedNetwork", "FoldingReport", "fold_batch_norms"]
