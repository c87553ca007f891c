"""kernels: tensors in, tensors out. `ops` and `bound` hold the entry points, `args` their arguments, `registry` the
kernels.

May import torch, never core: the page tables of any engine will do.
"""

from __future__ import annotations
