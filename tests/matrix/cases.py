"""All cases of the matrix."""

from right import RIGHT
from seeds import SEEDS
from wrong import DISAGREEMENTS, MISTAKES

CASES = [*RIGHT, *SEEDS, *MISTAKES, *DISAGREEMENTS]
