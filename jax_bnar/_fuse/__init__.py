"""`fuse` finds BatchNorm-Add-ReLU in a traced program and replaces it; see README.md here."""

from jax_bnar._fuse.api import explain as explain
from jax_bnar._fuse.api import fuse as fuse
from jax_bnar._fuse.report import FusionReport as FusionReport
