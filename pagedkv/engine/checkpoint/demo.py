"""The prompt of `pagedkv generate` if the user gives none, in the language of the bundled checkpoint."""

from __future__ import annotations

from typing import Final

DEMO_PROMPT: Final = """\
Mira is a clockmaker from Lisbon. She keeps a red lamp in the cellar and a silver compass in the study.
Otto works as a baker and lives in Ghent. He was born in 1931 and has a blue kettle in the pantry.
Ghent has fourteen bridges and is famous for its lace.
Ingrid lives in Bergen and works as a pilot. She was born in 1968. She keeps a golden telescope in the tower.
Hugo keeps a green bicycle in the barn. Hugo also keeps a black violin in the attic.
Lisbon is renowned for its tulips.
Amara is a physicist from Kyoto. She was born in 1974 and keeps a white globe in the library.
Kyoto has twenty bridges and is famous for its gardens.
Bruno works as a glassblower and lives in Venice. He has a violet vase in the workshop and a grey anvil in the forge.
Yara is a poet from Granada. She keeps a crimson diary in the nursery.
Venice has thirty bridges and is famous for its glass.
Kofi is a judge from Bristol. He was born in 1955 and keeps a brown trumpet in the parlour.
Freya lives in Uppsala and works as a botanist. She keeps a purple umbrella in the greenhouse.
Mira also keeps a turquoise kettle in the kitchen.
Pablo is a potter from Toledo. He was born in 1946. Pablo keeps a yellow boat in the boathouse.
Uppsala is famous for its cathedrals. Hugo has a scarlet kite in the loft.
Where is the lamp of Mira?"""
"""A page of records and a question about the first one: the prompt of `pagedkv generate` if the user gives none."""
