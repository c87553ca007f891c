"""`python -m pagedkv.bench.gpu.model`: the table of predictions, see table.py."""

from pagedkv.bench.gpu.model.table import main

main()
