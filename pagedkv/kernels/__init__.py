"""kernels: tensors in, tensors out. `ops` holds the only entry points, `args` what they are given, `registry` who serves them.

May import torch; never core: any engine's page tables will do.
"""

from __future__ import annotations
